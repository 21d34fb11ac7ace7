"""What a session says of each step while it trains: numbers for a logger, and a line for people.

A step counts from the start of one backward pass that sums to the start of the next. So deferred updates, and the waits for
them, are in the step that they belong to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypedDict

from gradlane.core.backends import BackendName
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.live.adapt.profiling import Planner
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import now_ns
from gradlane.live.comm.stragglers import WINDOW
from gradlane.planning.measured import where
from gradlane.sim.bounds import lower_bound_ns
from gradlane.units import NS_PER_SECOND


class StepMetrics(TypedDict):
    """The last whole step on this rank. A number that is not known, or not yet, is None.

    step: how many whole steps there have been.
    step_seconds: its duration, with whatever the script did in it (loading data, an evaluation).
    exposed_seconds: communication that nothing hid; the training thread was blocked for sums or rank 0's buffers. None
        on a device: the host does not see its waits.
    hidden: the part, 0 to 1, of the time with messages in flight in which the training thread was
        not blocked. None on a device, and if nothing is sent.
    bytes, messages: gradients that a step sends, by the plan in force; 0 for one rank with the servers in its process.
    policy, backend: in force; "ddp" in the first steps, which are measured.
    searching: `auto` or a tuner is trying plans, so that steps differ.
    plans: how many were put in force so far, that of the first steps included.
    computing_seconds: a step without communication, as measured in the first steps. It has the
        passes, the update, and what the script does between `optimizer.step()` and the next
        forward pass.
    bound_seconds: simulated from that and the measured network; no schedule's step takes less.
        What the script does elsewhere, between the passes or before `step()`, is in neither.
    slowest_rank, slowest_busy_seconds: the rank that was busy for longest in the last five steps, and for how long of a step. A
        rank is busy when it does not wait for others. On rank 0 alone, and not on a device.
    """

    step: int
    step_seconds: float | None
    exposed_seconds: float | None
    hidden: float | None
    bytes: int
    messages: int
    policy: str | None
    backend: BackendName | None
    searching: bool
    plans: int
    computing_seconds: float | None
    bound_seconds: float | None
    slowest_rank: int | None
    slowest_busy_seconds: float | None


NOTHING = StepMetrics(
    step=0, step_seconds=None, exposed_seconds=None, hidden=None, bytes=0, messages=0, policy=None, backend=None,
    searching=False, plans=0, computing_seconds=None, bound_seconds=None, slowest_rank=None, slowest_busy_seconds=None,
)  # fmt: skip
"""Where one process trains alone."""


class Meter:
    """Counts what steps take. On the training thread; `begin` costs about a microsecond.

    Args:
        driver, planner: of the session.
        on_device: sums are queued on a device's stream, where the host sees no waits.
        world: how many ranks train together.
    """

    def __init__(self, driver: Driver, planner: Planner, on_device: bool, world: int) -> None:
        self._driver, self._planner, self._on_device = driver, planner, on_device
        self._sends = world > 1 or planner.place.has_external_servers
        # when the present step began: the time, waits for sums and for other things, messages under way
        self._began: tuple[int, ...] | None = None
        self._last: tuple[int, ...] | None = None  # the same, in the last whole step
        self._bound: tuple[Profile, Place, int] | None = None
        self._size: tuple[Plan, int] | None = None
        self._steps = 0  # whole ones
        self.on_step: Callable[[], None] | None = None
        """Called at the end of each whole step."""

    def begin(self) -> None:
        """A backward pass that sums begins; the driver is not yet in its iteration."""
        driver = self._driver
        now = (now_ns(), driver.waited.total_ns, driver.waited_otherwise.total_ns, driver.communicated_ns)
        if self._began is not None:
            self._last = tuple(each - began for each, began in zip(now, self._began, strict=True))
            self._steps += 1
        self._began = now
        if self._last is not None and self.on_step is not None:
            self.on_step()

    def metrics(self, searching: bool) -> StepMetrics:
        """The metrics of the last whole step.

        Args:
            searching: plans are being tried.
        """
        plan, profile = self._driver.plan, self._planner.profile
        slowest = self._driver.coordination.channel.slowest
        step_s = exposed_s = hidden = None
        if self._last is not None:
            step_ns, waited_ns, otherwise_ns, communicated_ns = self._last
            step_s = step_ns / NS_PER_SECOND
            if not self._on_device:
                exposed_s = (waited_ns + otherwise_ns) / NS_PER_SECOND
                hidden = max(0.0, 1 - waited_ns / communicated_ns) if communicated_ns and self._sends else None
        return StepMetrics(
            step=self._steps,
            step_seconds=step_s,
            exposed_seconds=exposed_s,
            hidden=hidden,
            bytes=self._size_of(plan) if self._sends else 0,
            messages=len(plan.messages) if self._sends else 0,
            policy=plan.policy,
            backend=self._planner.place.backend,
            searching=searching,
            plans=self._driver.plans,
            computing_seconds=None if profile is None else profile.compute_ns / NS_PER_SECOND,
            bound_seconds=None if profile is None else self._bound_ns(profile, self._planner.place) / NS_PER_SECOND,
            slowest_rank=None if slowest is None else slowest.rank,
            slowest_busy_seconds=None if slowest is None else slowest.busy_us / 1e6,
        )

    def _size_of(self, plan: Plan) -> int:
        if self._size is None or self._size[0] is not plan:
            self._size = (plan, plan.size_bytes)
        return self._size[1]

    def _bound_ns(self, profile: Profile, place: Place) -> int:
        # milliseconds for a large model, so once for each profile and network
        if self._bound is None or self._bound[0] is not profile or self._bound[1] is not place:
            self._bound = (profile, place, lower_bound_ns(profile, where(place)))
        return self._bound[2]


class Progress:
    """Prints a line on stderr every so often: the mean of the steps since the line before.

    Args:
        metrics: the session's.
        every_s: seconds between two lines, at least.
        name: of the session, as the lines begin with it; "" for none.
    """

    def __init__(self, metrics: Callable[[], StepMetrics], every_s: float, name: str = "") -> None:
        self._metrics, self._every_ns, self._name = metrics, round(every_s * NS_PER_SECOND), name
        self._due_ns = now_ns() + self._every_ns
        self._steps, self._seconds, self._exposed = 0, 0.0, 0.0

    def step(self) -> None:
        """Called after each whole step."""
        metrics = self._metrics()
        self._steps += 1
        self._seconds += metrics["step_seconds"] or 0.0
        self._exposed += metrics["exposed_seconds"] or 0.0
        now = now_ns()
        if now < self._due_ns:
            return
        print(self._line(metrics), file=sys.stderr, flush=True)
        self._due_ns = now + self._every_ns
        self._steps, self._seconds, self._exposed = 0, 0.0, 0.0

    def _line(self, metrics: StepMetrics) -> str:
        each_s = self._seconds / self._steps
        parts = [f"{1e3 * each_s:.1f} ms a step"]
        if metrics["exposed_seconds"] is not None:
            parts.append(
                f"{1e3 * self._exposed / self._steps:.1f} ms of it waiting for sums ({self._exposed / self._seconds:.0%})"
            )
        if metrics["bound_seconds"] is not None:
            parts.append(f"simulated bound {1e3 * metrics['bound_seconds']:.1f} ms")
        state = "searching, now " if metrics["searching"] else ""
        parts.append(f"{state}{metrics['policy']} over {metrics['backend']}, {metrics['messages']} messages")
        if metrics["slowest_busy_seconds"] is not None:
            parts.append(
                f"rank {metrics['slowest_rank']} was busy for longest in the last {WINDOW} steps, "
                f"{1e3 * metrics['slowest_busy_seconds']:.1f} ms each"
            )
        of = f"{self._name}, " if self._name else ""
        return f"gradlane: {of}step {metrics['step']}: {'; '.join(parts)}"
