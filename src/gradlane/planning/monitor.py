"""Monitor: whether the network or the worker is still what was planned for, told from the job's own iterations.

Nothing is sent for it. The messages of an iteration say how fast the network is: while at least one is under way it is
busy, and the network that was planned for says how long those messages should have kept it so. No clock: what happened is
handed in as spans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from gradlane.core.network import MAX_RATE, Network
from gradlane.core.plan import Plan
from gradlane.core.timeline import Kind
from gradlane.planning.pattern import ready_parts

Row = tuple[Kind, int, int, int, int]
"""A span: kind, iteration, subject, start and end, in ns."""

NETWORK_MOVED = 0.4
"""The network has changed where messages take 1.4 times as long, or as short, as at the last look."""
COMPUTE_MOVED = 0.4
"""So for a worker's computing."""
ITERATION_MOVED = 0.5
"""So for whole iterations, against those in which the plan in force was measured."""
PATTERN_MOVED = 0.15
"""The model's pattern has changed where gradients are ready so much of the backward pass earlier or later (`pattern`)."""
CROWDED = 0.2
"""A machine is crowded where threads wait for a processor for so much more of an iteration than is normal there."""
PATIENCE, LONG_PATIENCE = 3, 8
"""Iterations in a row that have to say so: of the network; of the rest, which a busy machine disturbs more."""
CROWD_PATIENCE = 64
"""What a crowded machine shows is other work's doing, unless it stays crowded for so many iterations in a row."""
LEARN = 5
"""Iterations after a look from which it is learnt what is normal."""
_SHARE = 0.25  # of the bursts of an iteration, by what they should have taken, so much was faster than what is believed
_HIDDEN = 0.05  # networks that are busy for less of an iteration say little, and matter as little


@dataclass(frozen=True)
class Observed:
    """One iteration. slowness: how many times as long as planned for messages kept the network busy; None where too few
    were sent to tell. ready: by tensor, after which part of the backward pass its gradient was ready, if it was."""

    iteration_ns: int
    compute_ns: int
    slowness: float | None
    ready: Mapping[str, float] = field(default_factory=dict)


def observe(rows: Iterable[Row], plan: Plan, network: Network, iteration_ns: int) -> Observed:
    """What the spans of one iteration of `iteration_ns` say, under `plan`, which was made for `network`.

    A burst is a time without a pause in which messages are under way. What begins with waiting for another rank makes a
    burst too long and nothing makes it too short, so that of an iteration the faster bursts count.
    """
    waited_ns = 0
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}
    ready_ns: dict[int, int] = {}
    backward = (0, 0)
    for kind, _, subject, start_ns, end_ns in rows:
        if kind == "wait":
            waited_ns += end_ns - start_ns
        elif kind == "ready":
            ready_ns[subject] = end_ns
        elif kind == "backward":
            backward = (start_ns, end_ns)
        elif kind in ("send", "receive"):
            begun[subject] = min(start_ns, begun.get(subject, start_ns))
            ended[subject] = max(end_ns, ended.get(subject, end_ns))
    sent = sorted((begun[message], ended[message], network.cost_ns(plan.messages[message].size_bytes)) for message in begun)
    found = _bursts(sent)
    busy_ns = sum(took_ns for took_ns, _ in found)
    slowness = _faster(found) if busy_ns > iteration_ns * _HIDDEN else None
    ready = ready_parts(ready_ns, backward, plan.tensors)
    return Observed(iteration_ns, max(0, iteration_ns - waited_ns), slowness, ready)


def _bursts(sent: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(how long, how long planned) of each burst of messages (start, end, planned), which come by their starts."""
    found: list[tuple[int, int]] = []
    start_ns = end_ns = planned_ns = 0
    for begun_ns, ended_ns, cost_ns in sent:
        if planned_ns and begun_ns > end_ns:
            found.append((end_ns - start_ns, planned_ns))
            planned_ns = 0
        if not planned_ns:
            start_ns, end_ns = begun_ns, ended_ns
        end_ns = max(end_ns, ended_ns)
        planned_ns += cost_ns
    return [*found, (end_ns - start_ns, planned_ns)] if planned_ns else found


def _faster(bursts: Sequence[tuple[int, int]]) -> float:
    """The slowness below which a share of the bursts is, each counted by what was planned for it."""
    ratios = sorted((took_ns / planned_ns, planned_ns) for took_ns, planned_ns in bursts)
    wanted = _SHARE * sum(planned_ns for _, planned_ns in ratios)
    for ratio, planned_ns in ratios:
        wanted -= planned_ns
        if wanted <= 0:
            return ratio
    raise AssertionError("there is a burst")


class Drift:
    """Whether one quantity has left what it was: only where `patience` values in a row are beyond the same side of the band.

    moved: half the width of the band, as in 0.3: from 1 / 1.3 to 1.3 times what is normal. normal: given, or the median
    of the first `LEARN` values.
    """

    def __init__(self, moved: float, normal: float | None = None, patience: int = PATIENCE) -> None:
        self._moved, self.normal, self._patience = moved, normal, patience
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=patience)

    def observe(self, value: float) -> float | None:
        """The factor by which it has moved, or None while it has not."""
        if self.normal is None:
            self._first.append(value)
            if len(self._first) == LEARN:
                self.normal = median(self._first)
            return None
        self._last.append(value)
        if len(self._last) < self._patience or not self.normal:
            return None
        high, low = self.normal * (1 + self._moved), self.normal / (1 + self._moved)
        if min(self._last) > high or max(self._last) < low:
            return median(self._last) / self.normal
        return None


@dataclass(frozen=True)
class Moved:
    """What has changed. network, compute, iteration: by which factor it takes longer than before, 1.0 for no change.
    pattern: by which part of the backward pass gradients are ready at other times, on average, 0.0 for no change."""

    network: float = 1.0
    compute: float = 1.0
    iteration: float = 1.0
    pattern: float = 0.0

    def __str__(self) -> str:
        told = (("messages", self.network), ("computing", self.compute), ("iterations", self.iteration))
        said = [f"{what} take {factor:.2f} times as long" for what, factor in told if factor != 1.0]
        if self.pattern:
            said.append(f"gradients are ready {self.pattern:.0%} of a backward pass earlier or later")
        return " and ".join(said) or "nothing has changed"


class Monitor:
    """Watches one plan from the time when it was settled upon. iteration_ns: what it was measured to take, if it was."""

    def __init__(self, iteration_ns: int | None = None) -> None:
        self._network = Drift(NETWORK_MOVED)
        self._compute = Drift(COMPUTE_MOVED, patience=LONG_PATIENCE)
        self._iteration = Drift(ITERATION_MOVED, iteration_ns, LONG_PATIENCE)
        self._last_shifts: deque[float] = deque(maxlen=LONG_PATIENCE)

    def observe(self, seen: Observed, shift: float | None = None) -> Moved | None:
        """What has moved, or None for nothing. Says so for as long as it is away from what it was.

        shift: by which part of the backward pass gradients are ready at other times than planned for, on average.
        """
        network = None if seen.slowness is None else self._network.observe(seen.slowness)
        moved = Moved(
            network or 1.0,
            self._compute.observe(seen.compute_ns) or 1.0,
            self._iteration.observe(seen.iteration_ns) or 1.0,
            self._shifted(shift),
        )
        return None if moved == Moved() else moved

    def _shifted(self, shift: float | None) -> float:
        if shift is None:
            return 0.0
        self._last_shifts.append(shift)
        enough = len(self._last_shifts) == LONG_PATIENCE and min(self._last_shifts) > PATTERN_MOVED
        return median(self._last_shifts) if enough else 0.0


class Crowd:
    """Whether other work keeps a machine's processors, so that an iteration says nothing about network and worker."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._in_a_row = 0

    def observe(self, waiting: float | None) -> bool:
        """An iteration for `waiting` of which threads waited for a processor: whether it is to be left out."""
        if waiting is None:
            return False
        if len(self._first) < LEARN:
            self._first.append(waiting)
            return False
        self._in_a_row = self._in_a_row + 1 if waiting > median(self._first) + CROWDED else 0
        if self._in_a_row <= CROWD_PATIENCE:
            return self._in_a_row > 0
        self._first, self._in_a_row = [], 0  # that is how it is here now
        return False


def slowed(network: Network, factor: float) -> Network:
    """The same network where bytes take `factor` times as long; what a message costs whatever its size stays."""
    pieces = tuple(
        msgspec.structs.replace(piece, bytes_per_second=min(MAX_RATE, max(1, round(piece.bytes_per_second / factor))))
        for piece in network.segments
    )
    source = f"{network.source}; {factor:.2f} times as slow since"
    return msgspec.structs.replace(network, segments=pieces, source=source[-1000:])
