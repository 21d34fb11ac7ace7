"""What every fabric promises: whatever carries simulated messages of a job in virtual time.

def test_my_fabric() -> None:
    check_fabric(lambda job: MyFabric(job, workers=3), ranks=3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradlane.core.checks import check_timeline
from gradlane.core.plan import WIRES, Wire
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.sim.bounds import oracle_ns
from gradlane.sim.fabric import FOREVER, Fabric, Job, Notice
from gradlane.sim.simulation import Simulation
from gradlane.testing.generators import holds_for, jobs
from gradlane.testing.logs import check_logs, logged_dispatchers

_ITERATIONS = 2


def check_fabric(
    make: Callable[[Job], Fabric],
    *,
    ranks: int = 1,
    wires: Sequence[Wire] = WIRES,
    two_phase: bool = True,
    one_order: bool = False,
    synchronous: bool = True,
    least_ns: Callable[[Profile], int] = oracle_ns,
    examples: int = 50,
) -> None:
    """Raise `AssertionError` unless fabrics that `make` makes keep every promise of a fabric.

    - Time never goes back. Nothing happens before `next_ns`, and what `run` returns happens at one
      time, no later than it was asked for.
    - Each message of each rank is pushed once, after it was handed over, and then pulled once. A two-phase message is pulled
      after it was asked for: by every rank, if the fabric is synchronous.
    - Nothing is invented for a rank or message that was not handed over, and nothing is forgotten:
      every iteration ends.
    - Two fabrics that are made alike do the same at the same times.

    The timelines of the ranks pass `check_timeline`, and the logs of their Dispatchers replay.

    Args:
        make: a fresh fabric for the messages of one job, whose ranks are numbered from 0.
        ranks: how many ranks the fabric has been made for.
        wires: kinds of `Plan.wire` that it carries.
        two_phase: whether it carries two-phase messages.
        one_order: whether all ranks must start messages in one order, as collectives need it.
        synchronous: whether a sum needs every rank's part; otherwise a rank is answered alone.
        least_ns: a time that no iteration of a profile may fall below; computation alone where not
            given.
        examples: jobs drawn.
    """

    def check(job: Job) -> None:
        found = [_run(make(job), job, ranks, synchronous) for _ in range(2)]
        assert found[0] == found[1], "two fabrics that are made alike do not do the same"
        for timeline in found[0]:
            check_timeline(timeline, job.plan)
        took_ns = max(timeline.iteration_ns()[-1] for timeline in found[0])
        least = least_ns(job.profile)
        assert took_ns >= least, f"an iteration takes {took_ns} ns, and no fabric takes less than {least} ns"

    sequenced = True if one_order else None
    holds_for(examples, check, job=jobs(wires, two_phase, sequenced))


def _run(fabric: Fabric, job: Job, ranks: int, synchronous: bool) -> tuple[Timeline, ...]:
    watched = _Watched(fabric, job, ranks, synchronous)
    staleness = 0 if synchronous else None
    percent = [100 + 50 * rank for rank in range(ranks)]  # alike, none would wait for another
    with logged_dispatchers() as made:
        simulation = Simulation([job], [(0, each) for each in percent], watched, _ITERATIONS, staleness=staleness)
        try:
            (timelines,) = simulation.run()
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"the simulation ends with {error!r}") from error
    watched.check_nothing_left()
    check_logs(made, job.plan, dispatchers=ranks, iterations=_ITERATIONS)
    return timelines


class _Watched:
    """A fabric that passes everything on to another, and asserts what both sides promise."""

    def __init__(self, fabric: Fabric, job: Job, ranks: int, synchronous: bool) -> None:
        self._fabric, self._ranks, self._synchronous = fabric, ranks, synchronous
        self._two_phase = [message.two_phase for message in job.plan.messages]
        self.events = fabric.events
        self._now_ns = 0
        # by rank the messages in flight, in the order of what happens to them
        self._handed_over: list[set[int]] = [set() for _ in range(ranks)]
        self._pushed: list[set[int]] = [set() for _ in range(ranks)]
        self._asked: list[set[int]] = [set() for _ in range(ranks)]
        # how often a message was given for its sum, and its sum returned
        self._given = [[0] * len(self._two_phase) for _ in range(ranks)]
        self._pulled = [[0] * len(self._two_phase) for _ in range(ranks)]
        assert fabric.next_ns() >= FOREVER, f"before anything is handed over, something happens at {fabric.next_ns()}"

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)
        self._handed_over[rank].add(message)
        if not self._two_phase[message]:
            self._given[rank][message] += 1
        self._fabric.hand_over(now_ns, rank, message)

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)
        self._pushed[rank].remove(message)
        self._asked[rank].add(message)
        self._given[rank][message] += 1
        self._fabric.ask(now_ns, rank, message)

    def next_ns(self) -> int:
        at_ns = self._fabric.next_ns()
        assert at_ns >= self._now_ns, f"at {self._now_ns} what happens next is said to have happened at {at_ns}"
        return at_ns

    def run(self, until_ns: int) -> list[Notice]:
        at_ns, events = self.next_ns(), self._fabric.events
        notices = self._fabric.run(until_ns)
        self.events = self._fabric.events
        assert self.events >= events, f"the fabric had taken {events} steps, and now {self.events}"
        if not notices:
            assert self._fabric.next_ns() > until_ns, f"it has not run to {until_ns}: {self._fabric.next_ns()} comes next"
            return notices
        times = sorted({notice.now_ns for notice in notices})
        assert len(times) == 1, f"notices of one call are of the times {times}, expected one time"
        assert at_ns <= times[0] <= until_ns, f"a notice of {times[0]}, where {at_ns} was next and {until_ns} the end"
        self._now_ns = times[0]
        for notice in notices:
            self._note(notice)
        return notices

    def check_nothing_left(self) -> None:
        left = [
            f"message {message} of rank {rank} was {what}, and then forgotten"
            for what, by_rank in (("handed over", self._handed_over), ("pushed", self._pushed), ("asked for", self._asked))
            for rank, messages in enumerate(by_rank)
            for message in sorted(messages)
        ]
        assert not left, left[0]

    def _note(self, notice: Notice) -> None:
        _, rank, message, pulled = notice
        assert 0 <= rank < self._ranks, f"{notice}: there are {self._ranks} ranks"
        if not pulled:
            assert message in self._handed_over[rank], f"{notice}: it was not handed over, or was pushed before"
            self._handed_over[rank].remove(message)
            self._pushed[rank].add(message)
            return
        place = self._asked if self._two_phase[message] else self._pushed
        assert message in place[rank], f"{notice}: it was not {'asked for' if self._two_phase[message] else 'pushed'}"
        place[rank].remove(message)
        self._pulled[rank][message] += 1
        if self._synchronous:
            late = [other for other in range(self._ranks) if self._given[other][message] < self._pulled[rank][message]]
            assert not late, f"{notice}: the sum is there without the part of rank {late[0] if late else None}"
