"""Facts: everything that a report shows, as data for the page's scripts.

Times are microseconds as integers, and milliseconds where a name ends in `_ms`. The
thousands of bars are columns of small integers, each start counted from the one before: that compresses
to a third of what rows of times do.
"""

from __future__ import annotations

import msgspec

COMPUTE_KINDS = ("forward", "backward", "update", "wait")
"""What the compute track of a rank shows; `RankBars.compute` has indices into it."""


class RankBars(msgspec.Struct, frozen=True):
    """What one rank did in the iterations that are shown.

    Attributes:
        rank: the rank; -1 for a simulated one.
        compute: columns kind, subject (a tensor; a layer for forward; -1 for none), start after the
            one before, length.
        messages: columns message, iteration counted from the first shown, start after the one before, and three lengths: the
            time that it was ready before its start, its first phase, and the rest until it had arrived.
    """

    rank: int
    compute: list[list[int]]
    messages: list[list[int]]


class PlanFacts(msgspec.Struct, frozen=True):
    """A plan, for its picture.

    Attributes:
        headline: one line on it.
        tensors: (name, bytes) in order of readiness.
        messages: by message (lane, urgency as `drawing.urgencies` has it, place in the order of starting, what it carries).
        slices: by message, flat: tensor, offset and length in bytes.
    """

    headline: str
    tensors: list[tuple[str, int]]
    messages: list[tuple[int, int, int, str]]
    slices: list[list[int]]


class LinkFacts(msgspec.Struct, frozen=True):
    """One direction of a link: flat (time, Mbit/s since the time before, bytes queued)."""

    name: str
    samples: list[int]


class Timeline(msgspec.Struct, frozen=True):
    """Some iterations of one arm; time 0 is when the first of them began.

    Attributes:
        iterations: flat, start and end of each iteration that is shown, on the first rank.
        ranks: what was measured.
        simulated: the same iterations of one rank in the simulator; None if it was not asked.
        links: empty where links were not sampled.
    """

    iterations: list[int]
    ranks: list[RankBars]
    simulated: RankBars | None = None
    links: list[LinkFacts] = []


class Parts(msgspec.Struct, frozen=True):
    """Where the time of a step goes on the first rank, in ms a step, the mean of `iterations`.

    Attributes:
        forward, backward, update: computing, without waits.
        wait: blocked for sums: the communication that nothing hides.
        other: the rest of a step, outside of the model and the optimizer.
        waited_for: (layer or tensor, ms), the longest first.
    """

    iterations: int
    forward: float
    backward: float
    update: float
    wait: float
    other: float
    waited_for: list[tuple[str, float]]

    @property
    def waits(self) -> float:
        """The part of a step that is spent blocked."""
        return self.wait / (self.forward + self.backward + self.update + self.wait + self.other)


class TryFacts(msgspec.Struct, frozen=True):
    """One search of `auto`: why, what it tried with its times in ms, and what it said."""

    why: str
    tried: list[tuple[str, list[float]]]
    verdict: str


class ChartFacts(msgspec.Struct, frozen=True):
    """Lines over numbers.

    Attributes:
        title, x, y: of the chart and its axes.
        log_x: factors of x are as wide everywhere.
        lines: (name, points), the points by rising x.
    """

    title: str
    x: str
    y: str
    log_x: bool
    lines: list[tuple[str, list[tuple[float, float]]]]


class TableFacts(msgspec.Struct, frozen=True):
    """Rows of text."""

    title: str
    headings: list[str]
    rows: list[list[str]]


class ArmFacts(msgspec.Struct, frozen=True):
    """One policy of a comparison, or of a simulation, which has no steps of its own.

    Attributes:
        name, note: for people.
        turns_ms: measured steps, by turn; empty if it was simulated.
        median_ms, low_ms, high_ms: of all steps: median, 10th and 90th percentile.
        speedup: ratio to torch DDP, 25th and 75th percentile of the turns; None for none. Of a
            simulation all three are the same.
        beats_bound: see `compare.records.Result`.
        hidden: the part of communication that did not lengthen the step.
        equal_to_ddp: bit for bit; None if not compared.
        predicted_ms, bound_ms: simulated, and what no schedule can beat; None if not simulated.
    """

    name: str
    note: str
    turns_ms: list[list[float]]
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    speedup: tuple[float, float, float] | None = None
    beats_bound: bool = False
    hidden: float | None = None
    equal_to_ddp: bool | None = None
    predicted_ms: float | None = None
    bound_ms: float | None = None
    parts: Parts | None = None
    plan: PlanFacts | None = None
    timeline: Timeline | None = None
    searches: list[TryFacts] = []


class TrialFacts(msgspec.Struct, frozen=True):
    """Arms that were measured in turns in one run.

    Attributes:
        title: the model and the cluster.
        answer, number: the result in one sentence, and in one number.
        bound: what no schedule can exceed, for people.
        baseline: the arm of torch DDP, if it took part; None of what is no comparison.
        recommended: the arm that the answer is about; None without one.
        limit: the speedup over `baseline` that no schedule can exceed; None if it is not known.
        lines: (name, ms): constant lines beside the steps.
        layers: names of the model's layers.
        remarks: what to know before relying on it.
        charts, tables: answers that are no timelines.
    """

    title: str
    answer: str
    number: str
    bound: str
    lines: list[tuple[str, float]]
    layers: list[str]
    arms: list[ArmFacts]
    baseline: str | None = None
    recommended: str | None = None
    limit: float | None = None
    remarks: list[str] = []
    charts: list[ChartFacts] = []
    tables: list[TableFacts] = []


class Facts(msgspec.Struct, frozen=True):
    """A report.

    Attributes:
        title: of the page.
        about: (what, value): machine, versions, command.
        trials: one for each run.
    """

    title: str
    about: list[tuple[str, str]]
    trials: list[TrialFacts]
