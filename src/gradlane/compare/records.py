"""Records of what `gradlane compare` measured: of one model, and of a sweep over models and
networks.
"""

from __future__ import annotations

import itertools
import statistics

import msgspec
import numpy as np

from gradlane.compare.arms import BASELINE
from gradlane.core.fields import MAX_BYTES, MAX_NS, need, need_int, need_name
from gradlane.core.files import MAX_FILE_BYTES
from gradlane.errors import FormatError

FORMAT = "gradlane.comparison"
SWEEP_FORMAT = "gradlane.sweep"
VERSION = 1


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy's run.

    Attributes:
        policy: its name.
        step_ns: length of each measured step on rank 0; empty if the run gave none.
        hidden: fraction of communication that was overlapped, 0 to 1; None if not observed.
        final_loss: None if it was not finite.
        equal_to_ddp: whether the final parameters equal DDP's bit for bit; None if not compared.
        note: for people.
    """

    policy: str
    step_ns: tuple[int, ...]
    hidden: float | None = None
    final_loss: float | None = None
    equal_to_ddp: bool | None = None
    note: str = ""

    def __post_init__(self) -> None:
        need_name("policy", self.policy)
        for index, step in enumerate(self.step_ns):
            need_int(f"step_ns[{index}]", step, 1, MAX_NS)
        need(self.hidden is None or 0 <= self.hidden <= 1, "hidden", self.hidden, "a part from 0 to 1")

    def quantile_ns(self, part: float) -> float | None:
        """The interpolated quantile `part` (0 to 1) of the step times, in ns; None without steps."""
        return float(np.quantile(self.step_ns, part)) if self.step_ns else None

    @property
    def median_ns(self) -> float | None:
        return self.quantile_ns(0.5)


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All policies' runs of one command.

    Attributes:
        machine: what it ran on, for people.
        link_bits_per_second: None if links were not shaped.
        bound, bound_text: the ratio to DDP that no schedule can exceed, and how it was computed.
        results: one for each policy.
    """

    command: str
    machine: str
    hosts: int
    link_bits_per_second: int | None
    model: str
    parameter_bytes: int
    bound: float | None
    bound_text: str
    results: tuple[Result, ...]

    def __post_init__(self) -> None:
        need_int("hosts", self.hosts, 1, 1_000_000)
        need_int("parameter_bytes", self.parameter_bytes, 1, MAX_BYTES)
        if self.link_bits_per_second is not None:
            need_int("link_bits_per_second", self.link_bits_per_second, 1, 10**15)
        policies = [result.policy for result in self.results]
        need(len(set(policies)) == len(policies), "results", "a policy twice", "each policy once")

    def ratio(self, result: Result) -> float | None:
        """DDP's median step over this one's: above 1 is faster. None if either has no steps."""
        baseline = next((other.median_ns for other in self.results if other.policy == BASELINE), None)
        own = result.median_ns
        return None if baseline is None or own is None else baseline / own

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` gives back an equal value. A bound that is not finite becomes
        null.
        """
        return msgspec.json.encode({"format": FORMAT, "version": VERSION, "body": self})

    @staticmethod
    def from_json(data: bytes) -> Comparison:
        """Decode what `to_json` wrote.

        Raises:
            FormatError: `data` is something else.
        """
        if len(data) > MAX_FILE_BYTES:
            raise FormatError(f"got {len(data)} bytes, expected at most {MAX_FILE_BYTES}")
        try:
            file = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"not a {FORMAT} file: {error}") from None
        if file.format != FORMAT or file.version != VERSION:
            raise FormatError(f"got {file.format!r:.80} version {file.version}, expected {FORMAT} version {VERSION}")
        return file.body


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    body: Comparison


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One arm on a model, a number of hosts and a link.

    Attributes:
        step_ns: each measured step on rank 0.
        compute_ns: length of a step without communication.
        predicted_ns, bound_ns: the simulated iteration time of this arm's plan, and the lower
            bound.
        network: as measured by the run.
        final_step_ns: steps of the final rounds, in which only the fastest arms took part.
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

    @property
    def median_ns(self) -> int:
        return round(statistics.median(self.step_ns))

    @property
    def error(self) -> float:
        """Relative error of the prediction; above 0 if the simulator was too slow."""
        return self.predicted_ns / self.median_ns - 1

    def quantile_ns(self, part: float) -> float:
        return float(np.quantile(self.step_ns, part))


class Sweep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All cells of one command; those of a trial are neighbours, torch DDP first."""

    command: str
    machine: str
    cells: tuple[Cell, ...]

    @property
    def trials(self) -> list[tuple[Cell, ...]]:
        key = lambda cell: (cell.model, cell.hosts, cell.link_bits_per_second, cell.scale)  # noqa: E731
        return [tuple(cells) for _, cells in itertools.groupby(self.cells, key)]

    def to_json(self) -> bytes:
        return msgspec.json.encode({"format": SWEEP_FORMAT, "version": VERSION, "body": self})
