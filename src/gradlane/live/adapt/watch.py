"""Watch: what one rank's own iterations say about network, worker and model; `tune.monitor` on what the recorder saw.

Rank 0 alone watches: what slows another rank down reaches it as sums that come later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.live.adapt.contention import Pressure
from gradlane.live.comm.recorder import Recorder
from gradlane.planning.monitor import LEARN, PATIENCE, Crowd, Monitor, Moved, Observed, observe, slowed
from gradlane.planning.pattern import shift_of, with_pattern


class Watch:
    """Owned by whoever plans anew. network: what was planned for at first.

    stream_ordered: sums end, for the host, when they are queued on a device, and say nothing about the network.
    """

    def __init__(self, recorder: Recorder, network: Network, stream_ordered: bool) -> None:
        self._recorder, self._network, self._stream_ordered = recorder, network, stream_ordered
        self._pressure = Pressure()
        self._ready: deque[Mapping[str, float]] = deque(maxlen=PATIENCE)
        self._first: list[float] = []  # slowness, when `network` had just been measured
        self._last: deque[float] = deque(maxlen=PATIENCE)
        self._monitor, self._crowd = Monitor(), Crowd()

    def settle(self, iteration_ns: int | None = None) -> None:
        """Another plan is in force for good; what is normal is learnt anew. iteration_ns: where that is known already."""
        self._monitor, self._crowd = Monitor(iteration_ns), Crowd()

    def observe(self, plan: Plan, profile: Profile, iteration_ns: int, watching: bool = True) -> Moved | None:
        """An iteration under `plan` took so long: what has moved since `settle`, and from `profile`, which was planned for.

        watching: False while plans are tried.
        """
        waiting = self._pressure.part_of(iteration_ns)
        if watching and self._crowd.observe(waiting):
            return None
        seen = observe(self._recorder.last(), plan, self._network, iteration_ns)
        self._ready.append(seen.ready)
        if self._stream_ordered:
            seen = Observed(iteration_ns, seen.compute_ns, None)
        elif seen.slowness is not None:
            if len(self._first) < LEARN:
                self._first.append(seen.slowness)
            self._last.append(seen.slowness)
        if not watching:
            return None
        return self._monitor.observe(seen, None if self._stream_ordered else shift_of(profile, seen.ready))

    def profile(self, planned_for: Profile, moved: Moved) -> Profile:
        """The profile as it is now, from the one that was planned for, and what has moved since."""
        if moved.pattern:
            names = set.intersection(*(set(ready) for ready in self._ready))
            planned_for = with_pattern(planned_for, {name: median(ready[name] for ready in self._ready) for name in names})
        return planned_for.stretched(moved.compute)

    @property
    def network(self) -> Network:
        """The network as it is now: what was measured at first, slowed down by as much as messages take longer now."""
        if not self._last or len(self._first) < LEARN:
            return self._network
        return slowed(self._network, median(self._last) / median(self._first))
