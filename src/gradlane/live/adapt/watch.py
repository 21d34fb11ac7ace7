"""Watch: detects changes of network, worker and model from rank 0's own iterations, with
`planning.monitor`.

Rank 0 alone watches. It sees a slowdown of another rank as sums that arrive later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import structs

from gradlane.core.backends import BackendName
from gradlane.core.place import Place, place_of
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.live.adapt.contention import Pressure
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.planning.monitor import LEARN, PATIENCE, Crowd, Monitor, Moved, Observed, observe, slowed
from gradlane.planning.pattern import shift_of, with_pattern
from gradlane.planning.rounds import Round

_PART_OF_TIME = 0.002  # that watching may take, which delays rank 0 and with it all others


class Watch:
    """Observes one session's iterations, for the controller that owns it.

    Args:
        recorder: of the session; it has the spans of the last iteration.
        places: those that the first plans were made for, one for each backend of the session.
        stream_ordered: sums are reported done when they are queued on a device's stream. Their
            times then say nothing about the network, and only iteration times are watched.
        on_device: the host runs ahead of what computes, so that its clock says nothing about computing.
    """

    def __init__(self, recorder: Recorder, places: Sequence[Place], stream_ordered: bool, on_device: bool) -> None:
        self._recorder, self._places = recorder, tuple(places)
        self._stream_ordered, self._on_device = stream_ordered, on_device
        self._pressure = Pressure()
        self._ready: deque[Mapping[str, float]] = deque(maxlen=PATIENCE)
        # over each backend, slowness of the first `LEARN` iterations: as if its network had just been
        # measured, so that what `places` had been slowed down by then is divided out
        self._first: dict[BackendName, list[float]] = {place.backend: [] for place in places}
        self._last: deque[float] = deque(maxlen=PATIENCE)
        self._in_force, self._slowed = self._places[0].backend, 1.0
        self._monitor, self._crowd = Monitor(), Crowd()
        self._costs_ns: deque[int] = deque(maxlen=LEARN)  # of the last looks
        self._since_ns = self._rest_ns = 0  # since the last look, and until the next

    def settle(self, iteration_ns: int | None = None) -> None:
        """Another plan was chosen for good by trying: learn anew what is normal.

        Args:
            iteration_ns: the normal iteration time in ns, if it is known already.
        """
        self._begin(Monitor(iteration_ns))

    def settle_after(self, moved: Moved) -> None:
        """Another plan is in force for good, made for what has `moved`; see
        `Monitor.under_another_plan`.
        """
        self._begin(self._monitor.under_another_plan(moved))

    def _begin(self, monitor: Monitor) -> None:
        self._monitor, self._crowd = monitor, Crowd()
        self._costs_ns.clear()
        self._rest_ns = 0

    def observe(self, plan: Plan, profile: Profile, ended: Round, watching: bool = True) -> Moved | None:
        """Take note of the round that has just ended, or leave it out: reading the spans of
        hundreds of small messages takes a millisecond.

        Args:
            plan: the one that the round ran under.
            profile: the one that `plan` was made for.
            ended: the round.
            watching: False while plans are tried: the round is recorded and not judged.

        Returns:
            What has changed since the plan is in force for good; None for nothing, while the machine is crowded
            (`monitor.Crowd`), and for a round that is left out.
        """
        # settled before the iteration is known: one that had a pause in it (an evaluation) would end each rest
        is_due = self._since_ns >= self._rest_ns
        self._since_ns += ended.took_ns
        if not is_due:
            return None
        began_ns = now_ns()
        moved = self._look(plan, profile, ended, watching)
        self._costs_ns.append(now_ns() - began_ns)
        # what is normal is learned from iterations in a row, and so is what has changed: one iteration with a pause in
        # it has a normal one behind it; in some looks another process has the processor, so the shortest one counts
        rests = len(self._costs_ns) == LEARN and not self._monitor.suspects
        self._rest_ns = round(min(self._costs_ns) / _PART_OF_TIME) if rests else 0
        self._since_ns = 0
        return moved

    def _look(self, plan: Plan, profile: Profile, ended: Round, watching: bool) -> Moved | None:
        waiting = self._pressure.part_of(self._since_ns)
        if watching and self._crowd.observe(waiting):
            return None
        place = place_of(plan.backend, self._places)
        if place.backend != self._in_force:
            self._in_force = place.backend
            self._last.clear()
        seen = observe(self._recorder.last(), plan, place.network, ended)
        self._ready.append(seen.ready)
        if self._on_device:
            seen = Observed(ended.took_ns, ended.took_ns, None if self._stream_ordered else seen.slowness)
        if seen.slowness is not None:
            if len(self._first[place.backend]) < LEARN:
                self._first[place.backend].append(seen.slowness / self._slowed)
            self._last.append(seen.slowness)
        if not watching:
            return None
        has_pattern = bool(seen.ready) and not self._on_device
        return self._monitor.observe(seen, shift_of(profile, seen.ready) if has_pattern else None)

    def profile(self, planned_for: Profile, moved: Moved) -> Profile:
        """`planned_for` with what has `moved` since: the times at which gradients become ready, and
        the computing time.
        """
        if moved.pattern:
            names = set.intersection(*(set(ready) for ready in self._ready))
            planned_for = with_pattern(planned_for, {name: median(ready[name] for ready in self._ready) for name in names})
        return planned_for.stretched(moved.compute)

    def places(self) -> tuple[Place, ...]:
        """The places as they are now: the first ones, slowed down by as much as messages over the backend in force. All places
        share the links.
        """
        first = self._first[self._in_force]
        if self._last and len(first) == LEARN:
            self._slowed = median(self._last) / median(first)
        if self._slowed == 1.0:
            return self._places
        return tuple(structs.replace(place, network=slowed(place.network, self._slowed)) for place in self._places)
