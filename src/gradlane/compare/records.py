"""Records of what `gradlane compare` measured: of one model, and of a sweep over models and
networks.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TypeVar

import msgspec

from gradlane.core.fields import MAX_BYTES, MAX_NS, need, need_int, need_name
from gradlane.core.files import MAX_FILE_BYTES, decode
from gradlane.core.records.speedup import Speedup
from gradlane.errors import FormatError

FORMAT = "gradlane.comparison"
SWEEP_FORMAT = "gradlane.sweep"
VERSION = 2

Record = TypeVar("Record")


def hosts_text(hosts: int, ranks_per_host: int) -> str:
    """How many hosts, and with how many ranks if it is not one, for people."""
    return f"{hosts} hosts" + (f" of {ranks_per_host} ranks" if ranks_per_host > 1 else "")


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy's run.

    Attributes:
        policy: its name.
        step_ns: length of each measured step on rank 0; empty if the run gave none.
        speedup: over torch DDP in the same turns; None without steps of both.
        beats_bound: whether that is above the comparison's bound; its remarks then say why.
        hidden: fraction of communication that was overlapped, 0 to 1; None where a step takes longer than computing and
            communicating one after the other, or if not observed.
        loss: after the comparison's `loss_step`; None if it was not finite.
        equal_to_ddp: whether the final parameters equal DDP's bit for bit; None if not compared.
        note: for people.
        card_bytes: what rank 0's emulated host sent in a step, with headers; None if not counted.
    """

    policy: str
    step_ns: tuple[int, ...]
    speedup: Speedup | None = None
    beats_bound: bool = False
    hidden: float | None = None
    loss: float | None = None
    equal_to_ddp: bool | None = None
    note: str = ""
    card_bytes: int | None = None

    def __post_init__(self) -> None:
        need_name("policy", self.policy)
        for index, step in enumerate(self.step_ns):
            need_int(f"step_ns[{index}]", step, 1, MAX_NS)
        need(self.hidden is None or 0 <= self.hidden <= 1, "hidden", self.hidden, "a part from 0 to 1")

    @property
    def median_ns(self) -> float | None:
        """The median step in ns; None without steps."""
        return statistics.median(self.step_ns) if self.step_ns else None


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All policies' runs of one command.

    Attributes:
        machine: what it ran on, for people.
        link_bits_per_second: None if links were not shaped.
        turns: how many turns each policy had, with as many measured steps each.
        bound, bound_text: the speedup over DDP that no schedule can exceed, from the same turns,
            and how it was computed.
        results: one for each policy.
        remarks: what to know before relying on the ratios; a line each.
        ranks_per_host: how many ranks shared a host's link.
        loss_step: after how many steps the losses are compared; None if they were not recorded.
    """

    command: str
    machine: str
    hosts: int
    link_bits_per_second: int | None
    model: str
    parameter_bytes: int
    turns: int
    bound: Speedup | None
    bound_text: str
    results: tuple[Result, ...]
    remarks: tuple[str, ...] = ()
    ranks_per_host: int = 1
    loss_step: int | None = None

    def __post_init__(self) -> None:
        need_int("hosts", self.hosts, 1, 1_000_000)
        need_int("turns", self.turns, 1, 1_000_000)
        need_int("parameter_bytes", self.parameter_bytes, 1, MAX_BYTES)
        if self.link_bits_per_second is not None:
            need_int("link_bits_per_second", self.link_bits_per_second, 1, 10**15)
        policies = [result.policy for result in self.results]
        need(len(set(policies)) == len(policies), "results", "a policy twice", "each policy once")

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` gives back an equal value. A loss that is not finite becomes
        null.
        """
        return msgspec.json.encode({"format": FORMAT, "version": VERSION, "body": self})

    @staticmethod
    def from_json(data: bytes) -> Comparison:
        """Decode what `to_json` wrote.

        Raises:
            FormatError: `data` is something else.
        """
        return _decoded(data, FORMAT, Comparison)


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One arm on a model, a number of hosts and a link.

    Attributes:
        step_ns: each measured step on rank 0.
        compute_ns: length of a step without communication.
        predicted_ns, bound_ns: the simulated iteration time of this arm's plan, and the lower
            bound.
        network: as measured by the run.
        turns: how many turns the steps are of, as many in each.
        speedup: over torch DDP in the same turns; None where torch DDP was not measured.
        final_step_ns: steps of the final rounds, in which only the fastest arms took part.
        folder: of the run, within the sweep's.
        ranks_per_host: how many ranks shared a host's link.
        gradient_bytes: of all gradients of one rank, in the run; 0 if not known.
        card_bytes: what rank 0's host sent in a step, with headers; None if not counted.
    """

    model: str
    hosts: int
    servers: int
    link_bits_per_second: int | None
    scale: float
    arm: str
    step_ns: tuple[int, ...]
    compute_ns: int
    predicted_ns: int
    bound_ns: int
    network: str = ""
    equal_to_ddp: bool | None = None
    final_step_ns: tuple[int, ...] = ()
    turns: int = 1
    speedup: Speedup | None = None
    folder: str = ""
    ranks_per_host: int = 1
    gradient_bytes: int = 0
    card_bytes: int | None = None

    def __post_init__(self) -> None:
        need(len(self.step_ns) > 0, "step_ns", "no steps", "one or more")
        need_int("turns", self.turns, 1, 1_000_000)
        is_plain = not {"/", "\0"} & set(self.folder) and self.folder not in (".", "..")
        need(is_plain, "folder", self.folder, "the name of a folder beside the file")

    @property
    def setting(self) -> tuple[str, int, int, int | None, float]:
        """What a trial is of, as people read it."""
        return self.model, self.hosts, self.ranks_per_host, self.link_bits_per_second, self.scale

    @property
    def beats_bound(self) -> bool:
        """Whether the median step is shorter than any schedule permits, by what the run measured."""
        return self.median_ns < self.bound_ns

    @property
    def median_ns(self) -> int:
        return round(statistics.median(self.step_ns))

    @property
    def error(self) -> float:
        """Relative error of the prediction; above 0 if the simulator was too slow."""
        return self.predicted_ns / self.median_ns - 1


class Sweep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All cells of one command; those of a trial are neighbours, torch DDP first."""

    command: str
    machine: str
    cells: tuple[Cell, ...]

    @property
    def trials(self) -> list[tuple[Cell, ...]]:
        """The cells of each run, which has a folder of its own: two profiles may have the name of one model."""
        return [tuple(cells) for _, cells in itertools.groupby(self.cells, lambda cell: cell.folder)]

    def model_of(self, trial: tuple[Cell, ...]) -> str:
        """A trial's model, for people, with its folder where another trial differs in the profile alone."""
        alike = [other for other in self.trials if other[0].setting == trial[0].setting]
        return trial[0].model + (f" ({trial[0].folder})" if len(alike) > 1 else "")

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` gives back an equal value."""
        return msgspec.json.encode({"format": SWEEP_FORMAT, "version": VERSION, "body": self})

    @staticmethod
    def from_json(data: bytes) -> Sweep:
        """Decode what `to_json` wrote.

        Raises:
            FormatError: `data` is something else.
        """
        return _decoded(data, SWEEP_FORMAT, Sweep)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    body: msgspec.Raw


def _decoded(data: bytes, expected: str, kind: type[Record]) -> Record:
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(f"got {len(data)} bytes, expected at most {MAX_FILE_BYTES}")
    file = decode(data, _File, "$", expected)
    if file.format != expected or file.version != VERSION:
        raise FormatError(f"got {file.format!r:.80} version {file.version}, expected {expected} version {VERSION}")
    return decode(file.body, kind, "$.body", expected)
