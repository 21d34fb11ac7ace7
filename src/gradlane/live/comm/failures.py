"""Failures: the first failure of a job, which stands, and waits that end with a result or with it.

Which failure stands is in `verdict.py`; here are its lock and its waits. The training thread blocks only in these waits.
Each ends by the timeout, by its own limit, or with the call that it waits for. What blocks in torch
or in native code runs beside it (`collective`). Everything that waits, and every later call, raises
the first failure. Any thread may report one. Other threads of the script may wait too, and so may a
signal handler that has interrupted a wait. Whoever waits gives up the turn (`turn.py`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from gradlane.errors import CommunicationError, JobError, PeerError
from gradlane.live.backends.calls import Call
from gradlane.live.backends.process_groups import ProcessGroups
from gradlane.live.comm import turn
from gradlane.live.comm.long_waits import REPORT_S, Timer
from gradlane.live.comm.recorder import Waited
from gradlane.live.comm.verdict import Verdict, Whereabouts
from gradlane.transport import NodeEngine

Result = TypeVar("Result")


@dataclass(frozen=True)
class _InAttach:
    """Whereabouts of a rank that has no driver yet."""

    rank: int

    @property
    def where(self) -> str:
        return f"rank {self.rank}, in attach"

    def describe_state(self) -> str:
        return "no sum has begun"


class Failures:
    """The failure of one session's job, if there is one, and its waits. Made by `attach`, before this
    rank meets the others.

    Args:
        rank: of this process.
        timeout_s: seconds after which a wait is an error.
        device: of the model.

    Attributes:
        lock: guards all that the threads which bring facts share; `wait_until` waits on it.
        interrupt: ends the wait of an engine in native code, see `wait_in`.
        at_once: called as soon as the job has failed, perhaps several times and under the lock: see `end_device_work`.
        awaited: what threads wait for.
        check: raises the failure of this job, if there is one.
        waited: by each thread, in all.
    """

    def __init__(self, rank: int, timeout_s: float, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)
        self.interrupt: Callable[[], None] = lambda: None
        self.at_once: list[Callable[[], None]] = []
        self._timeout_s, self._device = timeout_s, device
        self._verdict = Verdict(timeout_s, _InAttach(rank))
        self.check = self._verdict.check
        self.awaited: list[Callable[[], bool]] = []
        self._report: Callable[[float, str], None] = lambda waited_s, what: None
        self.waited = Waited()

    # -- reporting ---------------------------------------------------------------------------------

    @property
    def failure(self) -> JobError | None:
        """The first failure; None while there is none."""
        return self._verdict.failure

    @property
    def whereabouts(self) -> Whereabouts:
        """Gives texts for error messages; the driver, once there is one."""
        return self._verdict.whereabouts

    @whereabouts.setter
    def whereabouts(self, whereabouts: Whereabouts) -> None:
        self._verdict.whereabouts = whereabouts

    def tell_others_by(self, tell: Callable[[JobError], None]) -> None:
        """Have `tell` called, under the lock, with a failure that a wait on this rank finds."""
        self._verdict.tell_others = tell

    def report_waits_by(self, report: Callable[[float, str], None]) -> None:
        """Have `report` called now and then while a wait lasts, with its seconds so far and what is waited for."""
        self._report = report

    def fail(self, error: JobError) -> None:
        """Make `error` the failure of this job, unless it has failed before."""
        self.end_device_work()  # first: whoever has the lock may be blocked by it
        with self._condition:
            self._verdict.fail(error)
            self._end_waits()

    def end_device_work(self) -> None:
        """End what is stuck on a device, where the host would wait for it in a call of the script's. Does not wait."""
        for end in list(self.at_once):
            end()

    def suspect(self, error: BaseException) -> None:
        """Report a failed collective; the control channel will soon tell which rank is to blame."""
        with self._condition:
            self._verdict.suspect(error, time.monotonic())
            self._end_waits()

    def left(self, rank: int, why: JobError | None) -> None:
        """Report that `rank` left in order, and `why` if an exception made it leave: sums in flight get some more seconds."""
        with self._condition:
            self._verdict.left(rank, why, time.monotonic())
            self._end_waits()

    def notify(self, error: BaseException | None = None) -> None:
        """Wake `wait_until`, since something has ended that it may wait for.

        Args:
            error: if given, what has ended is a collective that failed with it.
        """
        if error is not None:
            self.suspect(error)
        with self._condition:
            self._condition.notify_all()

    def notify_if_awaited(self) -> None:
        """Wake `wait_until` if its predicate holds. Called under the lock.

        A wake-up costs more than all else that is done when a message ends.
        """
        if self.awaited and any(holds() for holds in self.awaited):
            self._condition.notify_all()

    def _end_waits(self) -> None:
        """Let whoever waits look at what has failed. Called under the lock."""
        self._condition.notify_all()
        self.interrupt()

    # -- waiting -----------------------------------------------------------------------------------

    def wait_until(self, predicate: Callable[[], bool], what: str, has_timeout: bool = True) -> None:
        """Block until `predicate()` holds.

        Args:
            predicate: called under the lock.
            what: names in error messages what is waited for.
            has_timeout: False if what is waited for ends by itself in time.

        Raises:
            JobError: the job has failed, or the predicate does not hold in time; its type and text
                say why.
        """
        deadline = time.monotonic() + self._timeout_s if has_timeout else math.inf
        reports = Timer(time.monotonic(), REPORT_S)
        with self._waiting(), self._condition, self._awaiting(predicate):
            while not predicate():
                remaining_s = min(self._remaining(deadline, what), self._until_report(reports, what))
                if remaining_s > 0:
                    self._condition.wait(remaining_s)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let other threads have the turn, and count for how long."""
        began_ns = time.monotonic_ns()
        with turn.given_up():
            yield
        self.waited.total_ns += time.monotonic_ns() - began_ns

    @contextmanager
    def _awaiting(self, predicate: Callable[[], bool]) -> Iterator[None]:
        self.awaited.append(predicate)
        try:
            yield
        finally:
            self.awaited.remove(predicate)

    def wait_briefly(self, predicate: Callable[[], bool], limit_ns: int) -> bool:
        """Block until `predicate()` holds, for `limit_ns` at most; return whether it does.

        Raises:
            JobError: the job has failed.
        """
        with self._waiting(), self._condition:
            with self._awaiting(predicate):
                self._condition.wait_for(lambda: predicate() or self.failure is not None, limit_ns / 1e9)
            self.check()
            return predicate()

    def wait_briefly_in(self, engine: NodeEngine, limit_ns: int) -> bool:
        """As `wait_briefly`, until everything that `engine` carries has arrived."""
        with self._waiting():
            came = engine.wait(None, engine.interruptions, limit_ns / 1e9)
        with self._abandoning(engine):
            self.check()
        return came

    @contextmanager
    def _abandoning(self, engine: NodeEngine) -> Iterator[None]:
        """The failure that is raised within ends what `engine` carries first: whoever hears of it may use its memory."""
        try:
            yield
        except JobError as error:
            engine.abandon(str(error))
            raise

    def wait_in(self, engine: NodeEngine, tensor: int | None, what: str, is_past: Callable[[], bool]) -> None:
        """Block until `tensor`, or with None everything, has arrived; natively, until something fails.

        Args:
            engine: carries out the plan; `interrupt` interrupts it.
            tensor: what is waited for.
            what: names it in error messages.
            is_past: whether it had arrived and the engine carries the next iteration by now.

        Raises:
            JobError: as `wait_until`.
        """
        deadline = time.monotonic() + self._timeout_s
        reports = Timer(time.monotonic(), REPORT_S)
        while True:
            interruptions = engine.interruptions  # before the look at what has failed
            with self._abandoning(engine), self.lock:
                remaining_s = min(self._remaining(deadline, what), self._until_report(reports, what))
            if is_past():
                return
            with self._waiting():
                has_arrived = engine.wait(tensor, interruptions, remaining_s)
            if has_arrived:
                return

    def _remaining(self, deadline: float, what: str) -> float:
        """Seconds until the wait for `what` fails, by `deadline` or earlier; raises the failure."""
        try:
            return self._verdict.remaining_s(deadline, what, time.monotonic())
        except JobError:
            self._end_waits()
            raise

    def _until_report(self, reports: Timer, what: str) -> float:
        """Report a wait if that is due; the seconds until it is again. Called under the lock."""
        now = time.monotonic()
        waited_s = reports.due(now)
        if waited_s is not None:
            self._report(waited_s, what)
        return reports.left_s(now)

    def wait_for_works(self, groups: ProcessGroups, works: Sequence[Any], what: str) -> None:
        """Wait until collectives on the host have ended.

        Args:
            groups: in which they were begun.
            works: what torch.distributed returned for them.
            what: names them in error messages.

        Raises:
            JobError: as `wait_until`.
        """
        ended = False

        def end(error: BaseException | None) -> None:
            nonlocal ended
            ended = error is None
            self.notify(error)

        groups.when_ended(works, end)
        self.wait_until(lambda: ended, what)

    def collective(self, call: Callable[[], Result], what: str = "an agreement between iterations") -> Result:
        """Run `call`, which waits for other ranks in torch or native code, until it ends or the job fails.

        It runs on a thread of its own, which is left behind when the job fails.

        Args:
            call: every wait in it has a timeout.
            what: names it in error messages.

        Returns:
            What `call` returns.

        Raises:
            JobError: the job has failed, or the call has, because of another rank.
            Exception: what else `call` raises.
        """
        running = Call(call, self._device, self.notify)
        self.wait_until(lambda: running.has_ended, what, has_timeout=False)
        try:
            return running.result()
        except (PeerError, CommunicationError, RuntimeError) as error:
            self._explain(error, what)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Raise the job's failure where torch.distributed raises an error of its own as a collective begins.

        NCCL does so once a rank is gone. Gloo reports that when the collective ends.

        Args:
            what: names in error messages what is begun.

        Raises:
            JobError: torch.distributed raised a `DistError`.
        """
        try:
            yield
        except dist.DistError as error:
            self._explain(error, what)

    def _explain(self, error: BaseException, what: str) -> NoReturn:
        """Raise the failure of the job. `error` is its first sign, and the control channel says which rank is to blame."""
        self.suspect(error)
        self.wait_until(lambda: False, what)
        raise error

    def verdict(self) -> JobError | None:
        """The reason why the last sums, which nobody waited for, failed; None if none is known."""
        if self._verdict.suspicion is None:
            return self.failure
        return self.failure or self._verdict.why_not("the last sums", time.monotonic())
