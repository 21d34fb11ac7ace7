"""What `gradlane compare` measured: the noun, its file and its table."""

from __future__ import annotations

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradlane.core.checking import MAX_BYTES, MAX_NS, need, need_int, need_name
from gradlane.core.files import MAX_FILE_BYTES
from gradlane.errors import FormatError
from gradlane.units import format_bytes, format_rate

FORMAT = "gradlane.comparison"
VERSION = 1
BASELINE = "torch-ddp"


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy's run.

    step_ns: length of each measured step on rank 0, empty where the run gave none. hidden: part of the sending
    time, 0 to 1, in which no one waited, None where it was not observed. final_loss: None where it was not a
    number. equal_to_ddp: whether the parameters at the end equal DDP's bit for bit, None where not compared.
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
        """The step time below which `part` (0 to 1) of the steps lie, interpolated; None without steps."""
        return float(np.quantile(self.step_ns, part)) if self.step_ns else None

    @property
    def median_ns(self) -> float | None:
        return self.quantile_ns(0.5)


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All policies' runs of one command.

    machine: what it ran on, for people. link_bits_per_second: None where the links were not shaped.
    bound: the ratio to DDP that no schedule can exceed, and bound_text how it comes about.
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
        """DDP's median step over this one's: above 1 is faster. None where either has no steps."""
        baseline = next((other.median_ns for other in self.results if other.policy == BASELINE), None)
        own = result.median_ns
        return None if baseline is None or own is None else baseline / own

    def to_json(self) -> bytes:
        """As JSON; `from_json` gives back an equal one. A loss or bound that is not finite becomes null."""
        return msgspec.json.encode({"format": FORMAT, "version": VERSION, "body": self})

    @staticmethod
    def from_json(data: bytes) -> Comparison:
        """What `to_json` wrote. Raises `FormatError`."""
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


def render(comparison: Comparison, console: Console) -> None:
    """Print `comparison`: DDP first, then in the order given, the best ratio marked, the bound below."""
    link = "links as they are" if comparison.link_bits_per_second is None else f"{_bits(comparison.link_bits_per_second)} links"
    size = format_bytes(comparison.parameter_bytes)
    title = f"{comparison.model}, {size} of parameters, {comparison.hosts} hosts, {link}"
    # a terminal of 80 columns must hold it
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in ("step ms", "p10", "p90", "x DDP", "hidden", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("= DDP", no_wrap=True)
    noted = any(result.note for result in comparison.results)
    if noted:
        table.add_column("note", no_wrap=True)
    ratios = {result.policy: comparison.ratio(result) for result in comparison.results}
    best = max((ratio for ratio in ratios.values() if ratio is not None), default=None)
    for result in sorted(comparison.results, key=lambda result: result.policy != BASELINE):
        ratio = ratios[result.policy]
        is_best = ratio is not None and ratio == best
        cells = [
            result.policy,
            *(_ms(result.quantile_ns(part)) for part in (0.5, 0.1, 0.9)),
            "-" if ratio is None else f"{ratio:.2f}{' *' if is_best else ''}",
            "-" if result.hidden is None else f"{result.hidden:.0%}",
            "-" if result.final_loss is None else f"{result.final_loss:.4f}",
            {True: "yes", False: "no", None: "-"}[result.equal_to_ddp],
            *([result.note] if noted else []),
        ]
        # as Text: what a file says is not markup
        table.add_row(*(Text(cell) for cell in cells), style="bold green" if is_best else None)
    console.print(Text(title, style="italic"))
    console.print(table)
    console.print(_below(comparison))


def _below(comparison: Comparison) -> Text:
    bound = "unknown" if comparison.bound is None else f"{comparison.bound:.2f} x DDP"
    text = f"bound: {bound}, {comparison.bound_text}" if comparison.bound_text else f"bound: {bound}"
    key = "* best ratio to torch DDP, above 1 is faster; = DDP: parameters and buffers at the end equal DDP's bit for bit"
    return Text(f"{text}\non {comparison.machine}\n{key}")


def _ms(time_ns: float | None) -> str:
    return "-" if time_ns is None else f"{time_ns / 1e6:.1f}" if time_ns >= 1e7 else f"{time_ns / 1e6:.2f}"


def _bits(bits_per_second: int) -> str:
    return format_rate(bits_per_second // 8) if bits_per_second >= 8 else f"{bits_per_second} bit/s"
