"""One simulated rank: a script that attaches, decides, sums, changes plans and closes.

Real are the protocol, the verdict of failures, the coordination and the decisions about plans (`control_protocol.py`,
`verdict.py`, `coordination.py`, `decisions.py`). Simulated are sockets, threads, the store where ranks meet, and collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradlane.errors import CommunicationError, JobError, MismatchError, NotFiniteError
from gradlane.live.adapt.decisions import ControlDecision, ControlDecisions
from gradlane.live.comm.control_protocol import LAST_WORDS_S
from gradlane.live.comm.coordination import Coordination
from gradlane.live.comm.verdict import Verdict
from tests.faults.channel import SimulatedChannel
from tests.faults.world import Process

FOR_EVER = 1e9
GRACE_S = 5.0  # as in `startup/agreement.py`


class ByTheHarm(Exception):
    """What a script raises as an error of its own."""


@dataclass
class Wait:
    """What a script waits for: until `holds`, or for `limit_s` at most, or, if it `hears` of that, until the job has failed."""

    holds: Callable[[], bool]
    what: str
    limit_s: float
    hears: bool = True


Steps = Generator[Wait, None, Any]


class _Blocked(Exception):
    """A call of the real code would wait; it is called again when `wait.holds`."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait


class Failures:
    """What `comm/failures.py` does with a `Verdict`, for a script that is no thread."""

    def __init__(self, rank: Rank, timeout_s: float, verdict: type[Verdict]) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self.verdict = verdict(timeout_s, self)
        self.lock = threading.RLock()
        self.failed_at: float | None = None

    @property
    def where(self) -> str:
        return f"rank {self._rank.rank}, iteration {self._rank.iteration}"

    def describe_state(self) -> str:
        return "nothing is known of messages here"

    def fail(self, error: JobError) -> None:
        if self.failed_at is None:
            self.failed_at = self._rank.now
        self.verdict.fail(error)
        self._rank.look()

    def suspect(self, error: BaseException) -> None:
        self.verdict.suspect(error, self._rank.now)
        self._rank.look()

    def tell_others_by(self, tell: Callable[[JobError], None]) -> None:
        self.verdict.tell_others = tell

    def report_waits_by(self, report: Callable[[float, str], None]) -> None:
        pass  # a line in the log of rank 0

    def left(self, rank: int, why: JobError | None) -> None:
        self.verdict.left(rank, why, self._rank.now)
        self._rank.look()

    def notify(self) -> None:
        self._rank.look()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        self.verdict.check()
        if not holds():
            raise _Blocked(Wait(holds, what, self._timeout_s))


@dataclass
class Sum:
    """A collective: it ends on a rank some time after all have entered, or fails where a rank is gone."""

    entered: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    in_store: bool = False  # the end of a process breaks nothing: the store lives on
    broken: set[int] = field(default_factory=set)  # ranks on which it will not end
    what: dict[int, Any] = field(default_factory=dict)  # by rank: what it brought


class Rank:
    """A rank's process, script and channel.

    Args:
        job: that it belongs to; see `job.Job`.
        rank: its number.
        verdict: what decides which failure stands.

    Attributes:
        iteration: the last that it began; -1 before the first.
        state: "attaching", "training", "closing", "ended" or "failed".
        comes: whether it attaches at all.
        stopped_for_good: whether it was stopped and will not continue.
        meets: whether it has connected.
        has_left: whether it has left in order.
        error: that the script ended with.
        ended_at: when the script ended.
    """

    def __init__(self, job: Any, rank: int, verdict: type[Verdict]) -> None:
        self.job, self.rank = job, rank
        self.process = Process(job.world, f"rank {rank}")
        self.failures = Failures(self, job.timeout_s, verdict)
        self.iteration, self.plan, self.state = -1, 0, "absent"
        self.error: BaseException | None = None
        self.ended_at: float | None = None
        self.longest_wait: tuple[float, str] = (0.0, "")
        self._wait: Wait | None = None
        self._began = self._deadline = 0.0
        self._timer = 0
        self.comes = self.stopped_for_good = self.meets = self.has_left = False
        self.started_at = 0.0
        self.make_channel: Callable[..., SimulatedChannel]
        self.channel: Any = None  # a SimulatedChannel, once it attaches
        self.steps = 0
        self.token: str | None = None
        self.decisions = ControlDecisions()
        self._script: Steps = self._whole_script()

    @property
    def now(self) -> float:
        return float(self.job.world.now)

    def say(self, what: str, *values: Any) -> None:
        self.job.world.say(self.process, what, *values)

    @property
    def met_at(self) -> float | None:
        """When it first heard somebody on the control channel; None if it never did."""
        return None if self.channel is None else self.channel.heard_at

    @property
    def listens(self) -> bool:
        """Whether somebody can connect to it."""
        return self.process.lives and self.channel.listens and not self.channel.closed

    # -- the script ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the script."""
        self.started_at = self.now
        self.process.after(0.0, lambda: self._go(None))

    def _whole_script(self) -> Steps:
        try:
            yield from self._attach()
            yield from self._train()
        except (JobError, ByTheHarm) as error:
            self.error = error
            self.say("its script ends with {}: {}", type(error).__name__, error)
            if self.state == "attaching" and not self.meets:
                self.channel.fail(error)
                self.channel.release()  # as the constructor of ControlChannel does
            elif self.state == "training" and self.job.scripts_catch:
                self.say("its script catches that, and ends the process")
            else:
                self.coordination.abort(error)
                yield from self._pause(self.job.draw() * 0.3)  # tracebacks are printed, functions at exit run
                if self.job.draw() < 0.7:
                    self.channel.close()
        exits = self.error is not None and self.state == "training" and self.job.scripts_catch
        self.state = "ended" if self.error is None else "failed"
        self.ended_at = self.now
        if not exits:
            yield from self._pause(self.job.draw() * 0.5)
        self.say("its process ends")
        self.process.end()
        self.job.gone(self.rank)

    def _attach(self) -> Steps:
        self.state = "attaching"
        self.job.reached(self.rank, "attach")
        self.say("calls attach")
        self.coordination = Coordination(self.rank, self.failures, self.make_channel)  # type: ignore[arg-type]
        channel = self.channel
        if self.rank == 0:
            channel.on_turn = self.look
            channel.listen()
            protocol = channel.protocol
            wait = Wait(lambda: not protocol.missing or protocol.failure is not None, "the others", FOR_EVER, hears=False)
            yield wait
            if protocol.failure is not None:
                until = self.now + LAST_WORDS_S
                self.process.after(LAST_WORDS_S, self.look)
                yield Wait(lambda: not protocol.on_their_way or self.now >= until, "who is coming", FOR_EVER, hears=False)
                raise protocol.failure
            channel.on_turn = lambda: None
        else:
            self.job.come(self)
            yield Wait(lambda: self.token is not None, "to be called", self.job.timeout_s, hears=False)
            if self.token is None:
                raise MismatchError(f"rank {self.rank}: no word from rank 0")
            if not self.job.ranks[0].listens:
                raise CommunicationError(f"rank {self.rank} cannot reach the control channel of rank 0")
            channel.dial(self.job.ranks[0].channel, self.token)
        self.meets = True
        self.coordination.listen(lambda message: None, lambda forward, why: None)
        yield from self._agree("handshake")
        yield from self._collective("rank 0's parameters")

    def _train(self) -> Steps:
        self.state = "training"
        for iteration in range(self.steps):
            yield from self._pause(self.job.step_s(self.rank))
            if self.decisions.is_due(self):  # type: ignore[arg-type]
                yield from self._decide(iteration)
            self.iteration = iteration
            self.coordination.begin(iteration)
            self.job.began(self.rank, iteration, self.plan)
            is_finite = self.job.not_finite != (self.rank, iteration)
            if not is_finite:
                self.coordination.not_finite("weight")
            self.coordination.issued(self.plan * 1000 + iteration)
            yield from self._collective(f"the sums of iteration {iteration}", brings=is_finite)
            if not all(self.job.sums[f"the sums of iteration {iteration}"].what.values()):
                culprit, name = yield from self._blocking(partial(self.coordination.first_not_finite, iteration))
                error = NotFiniteError(f"the gradient of {name} on rank {culprit} is not finite", culprit)
                self.coordination.abort(error)
                raise error
        self.state = "closing"
        self.has_left = True
        self.say("closes")
        self.job.left(self.rank)
        self.channel.close(self.job.why_it_leaves(self.rank))

    def _decide(self, iteration: int) -> Steps:
        self.job.reached(self.rank, "decision")
        decision = quiet = None
        if self.rank == 0:
            change = self.job.draw() < 0.5
            decision, quiet = (ControlDecision.CHANGE if change else ControlDecision.STAY), 1 + int(self.job.draw() * 3)
        done = yield from self._blocking(lambda: self.decisions.announce(self, decision, quiet or 1))  # type: ignore[arg-type]
        self.job.decided(self.rank, iteration, done)
        self.say("takes {!r} for iteration {}", done, iteration)
        if done & ControlDecision.CHANGE:
            plan = int(self.job.draw() * 1e6) if self.rank == 0 else None
            what = f"another plan for iteration {iteration}"
            yield from self._collective(what, brings=plan)
            self.plan = self.job.sums[what].what[0]

    def decide(self, decided: int | None) -> int:
        """As `Driver.decide`, for `ControlDecisions`."""
        return self.coordination.decide(self.iteration + 1, decided)

    def interrupt(self, error: BaseException) -> None:
        """The script raises `error` where it is."""
        if self.state in ("attaching", "training") and self.error is None and self._wait is not None:
            self.say("raises {!r}", error)
            self._resume(error)

    # -- what it waits for --------------------------------------------------------------------------

    def _pause(self, seconds: float) -> Steps:
        """The script computes."""
        until = self.now + seconds
        self.process.after(seconds, self.look)
        yield Wait(lambda: self.now >= until - 1e-9, "itself", FOR_EVER, hears=False)

    def _agree(self, what: str) -> Steps:
        """The ranks compare terms in the store, as `startup/agreement.py` does; the end of its patience is a MismatchError."""
        limit_s = self.job.timeout_s + GRACE_S * (self.rank != 0)
        self.failures.verdict.check()
        entered, until = self.job.enter(self.rank, what, None), self.now + limit_s
        self.process.after(limit_s, self.look)
        yield Wait(lambda: self.rank in entered.ended or self.now >= until, what, FOR_EVER)
        if self.rank not in entered.ended:
            raise MismatchError(f"rank {self.rank}: no verdict from rank 0")

    def _blocking(self, call: Callable[[], Any]) -> Steps:
        while True:
            try:
                return call()
            except _Blocked as blocked:
                yield blocked.wait

    def _collective(self, what: str, brings: Any = None, limit_s: float | None = None) -> Steps:
        self.failures.verdict.check()
        entered = self.job.enter(self.rank, what, brings)
        yield Wait(lambda: self.rank in entered.ended, what, self.job.timeout_s if limit_s is None else limit_s)

    # -- running ------------------------------------------------------------------------------------

    def _go(self, error: BaseException | None) -> None:
        try:
            self._wait = self._script.throw(error) if error is not None else next(self._script)
        except StopIteration:
            self._wait = None
            return
        self._began = self.now
        self._deadline = self.now + self._wait.limit_s
        self.process.after(0.0, self.look)

    def look(self) -> None:
        """Something has happened: may the script go on?"""
        self.process.after(self.job.lags[self.rank].read(), self._look)

    def _look(self) -> None:
        wait = self._wait
        if wait is None or not self.process.lives:
            return None
        if wait.holds():
            return self._resume(None)
        if not wait.hears:
            if self.now >= self._deadline:
                self._resume(None)
            else:
                self._later(self._deadline - self.now)
            return None
        try:
            self._later(self.failures.verdict.remaining_s(self._deadline, wait.what, self.now))
        except JobError as error:
            if self.failures.failed_at is None:
                self.failures.failed_at = self.now
            self._resume(error)
        return None

    def _resume(self, error: BaseException | None) -> None:
        assert self._wait is not None
        if self._wait.limit_s < FOR_EVER:
            self.longest_wait = max(self.longest_wait, (self.now - self._began - self._wait.limit_s, self._wait.what))
        self._wait = None
        self._go(error)

    def _later(self, seconds: float) -> None:
        self._timer += 1
        timer = self._timer
        if seconds < FOR_EVER / 2:
            self.process.after(seconds, lambda: self._look() if timer == self._timer else None)
