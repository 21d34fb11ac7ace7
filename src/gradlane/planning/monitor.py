"""Monitor: tells from a job's own iterations whether network or worker have changed.

It sends nothing. The network is busy while at least one message is in flight; the network that the
plan was made for says how long those messages should have kept it busy. The monitor has no clock:
callers hand in spans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from gradlane.core.fields import MAX_RATE
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.timeline import Kind
from gradlane.planning.pattern import ready_parts
from gradlane.planning.rounds import Round

Row = tuple[Kind, int, int, int, int]
"""A span: kind, iteration, subject, start and end in ns."""

NETWORK_MOVED = 0.4
"""The network has changed if messages take 1.4 times as long, or 1 / 1.4, as in the last search
round.
"""
COMPUTE_MOVED = 0.4
"""The same for a worker's compute time."""
ITERATION_MOVED = 0.5
"""The same for iteration times, compared with those measured when the plan was chosen."""
FELT, COMPUTE_FELT = 0.05, 0.15
"""A change of network or computing counts if iterations take 1.05 or 1.15 times as long, or 1 / 1.05 or 1 / 1.15,
too. Where they do not, the plan hides it, and no other plan could gain much. Other work on the machine moves short
computing by half at any time, and iterations that mostly wait by a few percent.
"""
PATTERN_MOVED = 0.15
"""The pattern has changed if gradients are ready earlier or later by this fraction of the backward
pass (`pattern`).
"""
CROWDED = 0.2
"""A machine is crowded if threads wait for a processor for this fraction of an iteration more than
normal.
"""
PATIENCE, LONG_PATIENCE = 3, 8
"""How many iterations in a row must show a change: of the network; of the rest, which a busy
machine disturbs more.
"""
CROWD_PATIENCE = 64
"""Iterations on a crowded machine are left out, unless it stays crowded for this many in a row."""
LEARN = 5
"""Iterations after a search round that define what is normal."""
_SHARE = 0.25  # quantile of an iteration's bursts, weighted by planned time, that gives its slowness
_HIDDEN = 0.05  # a network that is busy for less of an iteration than this tells little and matters little


@dataclass(frozen=True)
class Observed:
    """One round as observed.

    Attributes:
        iteration_ns: its length.
        compute_ns: the part without waiting for communication, of this session or another one.
        slowness: how many times as long as planned the messages kept the network busy; None if too
            few were sent to tell.
        ready: by tensor name, after which fraction of the backward pass its gradient was ready. Empty
            for a round of several passes, which may have different patterns.
    """

    iteration_ns: int
    compute_ns: int
    slowness: float | None
    ready: Mapping[str, float] = field(default_factory=dict)


def observe(rows: Iterable[Row], plan: Plan, network: Network, seen: Round) -> Observed:
    """Observe one round.

    A burst is a time without a pause in which messages are in flight. Waiting for another rank
    makes a burst longer and nothing makes it shorter, so the faster bursts of an iteration count.

    Args:
        rows: spans of its last iteration.
        plan: the plan in force.
        network: the network that the plan was made for.
        seen: the round.
    """
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}
    ready_ns: dict[int, int] = {}
    backward = (0, 0)
    for kind, _, subject, start_ns, end_ns in rows:
        if kind == "ready":
            ready_ns[subject] = end_ns
        elif kind == "backward":
            backward = (start_ns, end_ns)
        elif kind in ("send", "receive"):
            begun[subject] = min(start_ns, begun.get(subject, start_ns))
            ended[subject] = max(end_ns, ended.get(subject, end_ns))
    sent = sorted((begun[message], ended[message], network.cost_ns(plan.messages[message].size_bytes)) for message in begun)
    found = _bursts(sent)
    busy_ns = sum(took_ns for took_ns, _ in found)
    slowness = _faster(found) if busy_ns > seen.took_ns / seen.passes * _HIDDEN else None
    ready = ready_parts(ready_ns, backward, plan.tensors) if seen.passes == 1 else {}
    return Observed(seen.took_ns, max(0, seen.took_ns - seen.blocked_ns), slowness, ready)


def _bursts(sent: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Measured and planned length of each burst; `sent`: (start, end, planned) by start."""
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
    """The quantile `_SHARE` of the bursts' slowness, weighted by planned time."""
    ratios = sorted((took_ns / planned_ns, planned_ns) for took_ns, planned_ns in bursts)
    wanted = _SHARE * sum(planned_ns for _, planned_ns in ratios)
    for ratio, planned_ns in ratios:
        wanted -= planned_ns
        if wanted <= 0:
            return ratio
    raise AssertionError("there is a burst")


class Drift:
    """Tells whether a quantity has changed: `patience` values in a row beyond one side of a band.

    Args:
        moved: half the width of the band: 0.3 means from 1 / 1.3 to 1.3 times normal.
        normal: the normal value; None: the median of the first `LEARN` values.
        patience: how many values in a row must agree.
    """

    def __init__(self, moved: float, normal: float | None = None, patience: int = PATIENCE) -> None:
        self._moved, self.normal, self._patience = moved, normal, patience
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=patience)

    def anew(self) -> Drift:
        """One that has seen nothing yet and knows what is normal if this one does."""
        return Drift(self._moved, self.normal, self._patience)

    def observe(self, value: float) -> float | None:
        """Take in a value.

        Returns:
            The factor by which the quantity has changed, or None if it has not.
        """
        if self.normal is None:
            self._first.append(value)
            if len(self._first) == LEARN:
                self.normal = median(self._first)
            return None
        self._last.append(value)
        if len(self._last) < self._patience or not self.normal:
            return None
        low, high = self._band(self.normal)
        if min(self._last) > high or max(self._last) < low:
            return median(self._last) / self.normal
        return None

    @property
    def suspects(self) -> bool:
        """Whether the last value was beyond the band, so that the next may tell of a change."""
        if not self.normal or not self._last:
            return False
        low, high = self._band(self.normal)
        return not low <= self._last[-1] <= high

    def _band(self, normal: float) -> tuple[float, float]:
        return normal / (1 + self._moved), normal * (1 + self._moved)


@dataclass(frozen=True)
class Moved:
    """What has changed.

    Attributes:
        network, compute, iteration: factor by which it takes longer than before; 1.0 for no change.
        pattern: fraction of the backward pass by which gradients are ready at other times, on
            average; 0.0 for no change.
    """

    network: float = 1.0
    compute: float = 1.0
    iteration: float = 1.0
    pattern: float = 0.0

    def __str__(self) -> str:
        told = (("messages take", self.network), ("computing takes", self.compute), ("iterations take", self.iteration))
        said = [f"{what} {factor:.2f} times as long" for what, factor in told if factor != 1.0]
        if self.pattern:
            said.append(f"gradients are ready {self.pattern:.0%} of a backward pass earlier or later")
        return " and ".join(said) or "nothing has changed"


class Monitor:
    """Watches the job under one plan.

    Args:
        iteration_ns: the iteration time measured when the plan was chosen, if it was.
    """

    def __init__(self, iteration_ns: int | None = None) -> None:
        self._network = Drift(NETWORK_MOVED)
        self._compute = Drift(COMPUTE_MOVED, patience=LONG_PATIENCE)
        self._iteration = Drift(ITERATION_MOVED, iteration_ns, LONG_PATIENCE)
        self._last_shifts: deque[float] = deque(maxlen=LONG_PATIENCE)
        self._last_ns: deque[int] = deque(maxlen=LONG_PATIENCE)

    def under_another_plan(self, moved: Moved) -> Monitor:
        """The monitor of the plan that answers to `moved`.

        What is normal is learned anew, but for a network that has not changed: it may do so while
        that is learned.
        """
        monitor = Monitor()
        if moved.network == 1.0:
            monitor._network = self._network.anew()
        return monitor

    def observe(self, seen: Observed, shift: float | None = None) -> Moved | None:
        """Take in an iteration.

        Args:
            seen: the iteration.
            shift: fraction of the backward pass by which gradients are ready at other times than
                planned, on average (`pattern.shift_of`).

        Returns:
            What has changed, for as long as it stays changed; None if nothing has.
        """
        self._last_ns.append(seen.iteration_ns)
        network = None if seen.slowness is None else self._network.observe(seen.slowness)
        compute = self._compute.observe(seen.compute_ns)
        moved = Moved(
            network if network is not None and self._is_felt(network, FELT, PATIENCE) else 1.0,
            compute if compute is not None and self._is_felt(compute, COMPUTE_FELT, LONG_PATIENCE) else 1.0,
            self._iteration.observe(seen.iteration_ns) or 1.0,
            self._shifted(shift),
        )
        return None if moved == Moved() else moved

    @property
    def suspects(self) -> bool:
        """Whether the last iteration differed so much that a change would look like it."""
        return any(drift.suspects for drift in (self._network, self._compute, self._iteration))

    def _is_felt(self, factor: float, felt: float, patience: int) -> bool:
        """Whether each of the last `patience` rounds was longer or shorter by `felt`, as the `factor` of network or computing
        says. True until the normal time is known.

        A change that the plan hides lasts, so that a few slow rounds would sooner or later seem to be due to it.
        """
        normal = self._iteration.normal
        if not normal:
            return True
        last = list(self._last_ns)[-patience:]
        return min(last) > normal * (1 + felt) if factor > 1 else max(last) < normal / (1 + felt)

    def _shifted(self, shift: float | None) -> float:
        if shift is None:
            return 0.0
        self._last_shifts.append(shift)
        enough = len(self._last_shifts) == LONG_PATIENCE and min(self._last_shifts) > PATTERN_MOVED
        return median(self._last_shifts) if enough else 0.0


class Crowd:
    """Tells whether other processes take a machine's processors, so that iterations tell nothing."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._in_a_row = 0

    def observe(self, waiting: float | None) -> bool:
        """Take in an iteration.

        Args:
            waiting: fraction of the iteration for which threads waited for a processor; None if
                unknown.

        Returns:
            Whether the iteration is to be left out.
        """
        if waiting is None:
            return False
        if len(self._first) < LEARN:
            self._first.append(waiting)
            return False
        self._in_a_row = self._in_a_row + 1 if waiting > median(self._first) + CROWDED else 0
        if self._in_a_row <= CROWD_PATIENCE:
            return self._in_a_row > 0
        self._first, self._in_a_row = [], 0  # this much waiting is normal now
        return False


def slowed(network: Network, factor: float) -> Network:
    """The same network with its rates divided by `factor`; startups stay."""
    segments = tuple(
        msgspec.structs.replace(segment, bytes_per_second=min(MAX_RATE, max(1, round(segment.bytes_per_second / factor))))
        for segment in network.segments
    )
    source = f"{network.source}; {factor:.2f} times as slow since"
    return msgspec.structs.replace(network, segments=segments, source=source[-1000:])
