"""A job without torch: parameters are numbers that count their updates, and a read of any other number is an error.

One thread trains, one delivers sums, and two read. Signals come between any two lines, and the process forks. What the
training thread does is what `live/session/steps.py` and `iterations.py` do, in short.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gradlane.live.session import phases, tracked, updates
from gradlane.live.session.phases import Event, NotAllowedError, Phase
from gradlane.live.session.tracked import Tracked
from tests.unit.interleaved import Threads, Turn

SOURCE = Path(str(updates.__file__))


class WrongError(AssertionError):
    """Somebody saw what nobody must see."""


class FailedError(Exception):
    """The job has failed."""


def mutated(old: str, new: str) -> ModuleType:
    """`updates.py` with a fault: with `new` in place of `old`."""
    source = SOURCE.read_text()
    assert source.count(old) == 1, f"{old!r} is in {SOURCE.name} {source.count(old)} times, expected once"
    spec = importlib.util.spec_from_loader("faulty_updates", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and typing look there
    exec(compile(source.replace(old, new), "faulty_updates.py", "exec"), module.__dict__)
    return module


class Call:
    """A call of an optimizer's `step`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.owes = optimizer, 0

    def ended(self) -> None:
        pass


class Optimizer:
    """Has parameters, perhaps of several sessions. The state of each counts its updates, and `done` the steps."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.params = params
        self.state = dict.fromkeys(params, 0)
        self.done = 0
        self.settle_first: dict[int, Callable[[], None]] = {}  # by session

    def state_is_read(self) -> None:
        while self.settle_first:
            number, settle = next(iter(self.settle_first.items()))
            settle()
            self.settle_first.pop(number, None)
        for param in self.params:
            if self.state[param] != self.done:
                raise WrongError(f"the state of {param.tracked.name} is of step {self.state[param]}, expected {self.done}")

    def update(self, param: Param, between: Callable[[], None]) -> None:
        param.value += 0.5
        between()
        self.state[param] += 1
        param.value += 0.5


class Param:
    """A parameter: `value` counts its updates, and `done` the steps that have returned."""

    def __init__(self, name: str, tensor: int, session: Session) -> None:
        self.tracked = Tracked(name, self, tensor)  # type: ignore[arg-type]
        self.session = session
        self.value = 0.0
        self.done = 0
        self.has_gradient = self.is_guarded = self.is_refused = False
        self.has_sum = True  # none is under way

    def read(self, exactly: bool) -> None:
        """As any code of the script reads a parameter. `exactly`: no `step()` runs meanwhile in another thread."""
        least = self.done
        if self.is_guarded:
            self.session.updates.use(self.tracked, lambda: None)
        value = self.value
        if self.is_refused:
            raise FailedError
        if value < least or value != int(value) or (exactly and value != self.done):
            raise WrongError(f"{self.tracked.name} is of step {value}, expected {least}")


class Session:
    """One attached model, and the `updates.Actions` on its numbers."""

    as_ordinary = contextlib.nullcontext

    def __init__(self, number: int, job: Job, params: int) -> None:
        self._number, self._job = number, job
        self.iteration = 0
        self.params = [Param(f"{number}.{index}", index, self) for index in range(params)]
        self.every = [param.tracked for param in self.params]
        self.updates: Any = job.module.Updates(job.turn, self)

    @staticmethod
    def _of(each: Tracked) -> Param:
        param: Any = each.param
        found: Param = param
        return found

    def check(self) -> None:
        if self._job.has_failed:
            raise FailedError

    def is_stepping(self, thread: int) -> bool:
        return self._job.stepping == thread

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        with self._job.turn.given_up():
            self._job.awaited.append(holds)
            self._job.threads.wait(lambda: holds() or self._job.has_failed)
            self._job.awaited.remove(holds)
        self.check()

    def look_at_waits(self) -> None:
        pass

    def has_raised(self, step: Any) -> None:
        """It raised before it updated anything."""

    def wait_for(self, several: Sequence[Tracked]) -> None:
        iteration = self.iteration
        for each in several:
            if not self._of(each).has_sum:
                self.wait_until(lambda each=each: self._of(each).has_sum or self.iteration != iteration, each.name)

    def wait_for_all(self) -> None:
        self.wait_for(self.every)

    def arriving_with(self, each: Tracked, several: Sequence[Tracked]) -> list[Tracked]:
        return [other for other in several if other is each or self._of(other).has_sum]

    def from_elsewhere(self, makes_updates: Callable[[], None]) -> None:
        pass

    def hide(self, several: Sequence[Tracked]) -> None:
        for each in several:
            self._of(each).has_gradient = False

    def show(self, several: Sequence[Tracked]) -> None:
        for each in several:
            self._of(each).has_gradient = True

    def guard(self, several: Sequence[Tracked]) -> None:
        for each in several:
            self._of(each).is_guarded = True

    def unguard(self, several: Sequence[Tracked]) -> None:
        for each in several:
            self._of(each).is_guarded = False

    def unguard_all(self) -> None:
        self.unguard(self.every)

    def is_guarded(self, each: Tracked) -> bool:
        return self._of(each).is_guarded

    def guard_state(self, step: Call | None) -> None:
        if step is None:
            raise WrongError("the state is guarded for an update that has been made")
        step.optimizer.settle_first[self._number] = self.updates.settle

    def unguard_state(self, step: Call) -> None:
        step.optimizer.settle_first.pop(self._number, None)

    def update(self, step: Call | None, several: Sequence[Tracked]) -> None:
        if step is None:
            raise WrongError("an update is made twice")
        for each in several:
            param = self._of(each)
            if not param.has_sum:
                raise WrongError(f"{each.name} is updated with a sum that has not arrived")
            step.optimizer.update(param, self._job.between)

    def all_are_made(self) -> None:
        pass

    all_are_summed = all_are_made

    def refuse(self, each: Tracked, why: str) -> None:
        self._of(each).is_refused = True


class Job:
    """One job under one seed.

    Args:
        seed: decides what the script does, and who goes on at which line.
        module: `updates.py`, or one with a fault.
    """

    def __init__(self, seed: int, module: ModuleType = updates) -> None:
        self._rng = random.Random(seed)
        self.module = module
        files = {str(updates.__file__), "faulty_updates.py", str(tracked.__file__), str(phases.__file__)}
        self.threads = Threads(self._rng, frozenset(files))
        self.turn = Turn(self.threads)
        self.stepping: int | None = None
        self.has_failed = self._has_ended = False
        self._on_the_way: list[Param] = []
        self._speed = self._rng.choice((0.0, 0.02, 0.1))
        self._looks = self._rng.choice(((0, 0, 0, 1), (0, 1, 2, 3)))  # a script that looks often leaves little to other threads
        self.awaited: list[Callable[[], bool]] = []  # by threads
        self.sessions = [Session(number, self, self._rng.choice((1, 2, 3))) for number in range(self._rng.choice((1, 1, 2)))]
        self._params = [param for session in self.sessions for param in session.params]
        self._optimizers = [Optimizer(self._params)]
        if self._rng.random() < 0.3:  # a second one has some of the same parameters
            self._optimizers.append(Optimizer([param for param in self._params if self._rng.random() < 0.7]))
        self._fails_at = self._rng.randrange(1, 40) if self._rng.random() < 0.3 else -1
        self._signals = self._rng.random() < 0.5
        self._raises = 0.2 if self._rng.random() < 0.2 else 0.0  # an optimizer, before it updates anything

    def run(self) -> None:
        """Run the job; raise whatever is wrong."""
        for work in (self._train, self._deliver, self._read, self._read):
            self.threads.add(work)
        if self._signals:
            self.threads.at_line = self._signal
        self.threads.run()

    def between(self) -> None:
        """Let other threads go on in the middle of an update."""
        for _ in range(3):
            self.threads.wait(lambda: True)

    # -- the network --------------------------------------------------------------------------------

    def _deliver(self) -> None:
        while True:
            self.threads.wait(lambda: self._has_ended or (bool(self._on_the_way) and self._comes()))
            if self._has_ended:
                return
            param = self._on_the_way.pop(self._rng.randrange(len(self._on_the_way)))
            self._fails_at -= 1
            if self._fails_at == 0:
                self.has_failed = True
                return
            param.has_sum = True

    def _comes(self) -> bool:
        """Whether the next sum is there: at last when somebody waits for one."""
        return any(not holds() for holds in self.awaited) or self._rng.random() < self._speed

    # -- the script ---------------------------------------------------------------------------------

    def _train(self) -> None:
        try:
            for _ in range(self._rng.choice((2, 4, 8))):
                self._forward()
                for session in self.sessions:
                    self._backward(session)
                self._look()
                for optimizer in self._optimizers:
                    self._step(optimizer)
                    self._look()
            for session in self.sessions:
                session.updates.settle()
        except FailedError:
            pass
        self._has_ended = True
        for session in self.sessions:
            session.updates.give_up(session.every, "the job has ended")
        for param in self._params:
            if param.value != param.done and not (param.is_refused and self.has_failed):
                raise WrongError(f"{param.tracked.name} is of step {param.value} in the end, expected {param.done}")

    def _forward(self) -> None:
        for session in self.sessions:
            with self.turn:
                if session.updates.hides:
                    session.updates.abandon()
        for param in self._rng.sample(self._params, len(self._params)):
            if self._rng.random() < 0.15:
                continue  # something reads it that no guard sees, or nobody
            param.read(exactly=True)

    def _backward(self, session: Session) -> None:
        with self.turn:
            stale = {param for param in session.params if param.value != param.done}
            unread = list(session.updates)
            session.updates.settle()
            session.updates.begin(session.every, unread)
            session.iteration += 1
            for param in session.params:
                param.has_sum = False
        try:
            for param in self._rng.sample(session.params, len(session.params)):
                if self._rng.random() < 0.9 and param not in stale:
                    param.tracked.happens(Event.GRADIENT)
                    param.tracked.happens(Event.SEND)
                elif param in stale and self._rng.random() < 0.3:
                    self._must_be_refused(param)
                else:
                    param.tracked.happens(Event.LACK)
                param.has_gradient = True
                self._on_the_way.append(param)
        except NotAllowedError as error:
            raise WrongError(str(error)) from error
        with self.turn:
            session.updates.end(session.every)

    def _must_be_refused(self, param: Param) -> None:
        """Something has used a value that was one step old: the gradient that came of it ends the job."""
        try:
            param.tracked.happens(Event.GRADIENT)
        except NotAllowedError:
            self.has_failed = True
            raise FailedError from None
        raise WrongError(f"{param.tracked.name} was read before its update, and its gradient is taken")

    def _step(self, optimizer: Optimizer) -> None:
        self.stepping = threading.get_ident()  # hooks run inside of `step`
        for session in self.sessions:
            with self.turn:
                self._split(session, optimizer)
        if self._rng.random() < self._raises:  # the script catches the error
            self.stepping = None
            return
        for param in optimizer.params:
            if param.has_gradient:
                optimizer.update(param, lambda: None)  # what a thread sees in the middle of it, it sees under DDP too
                self.between()
        for session in self.sessions:
            with self.turn:
                session.updates.stepped()
        optimizer.done += 1
        for param in optimizer.params:
            param.done += 1
        self.stepping = None

    def _split(self, session: Session, optimizer: Optimizer) -> None:
        several = [param.tracked for param in optimizer.params if param.session is session]
        if session.updates.hides:  # the last step has raised
            session.updates.abandon()
        session.updates.step_again()
        if any(each.step is not None and each.step.optimizer is optimizer for each in session.updates):
            session.updates.settle()
        session.updates.make(several)
        late = [each for each in several if not session._of(each).has_sum and self._rng.random() < 0.8]
        session.wait_for([each for each in several if each not in late])
        late = [each for each in late if each.phase is Phase.AWAITED]
        session.wait_for([each for each in several if each not in late])
        session.updates.step(several, late, Call(optimizer) if late else None)

    def _look(self) -> None:
        """What a script may do between two passes: read parameters, gradients and state, fork, save."""
        for _ in range(self._rng.choice(self._looks)):
            what = self._rng.choice(("parameter", "gradient", "state", "fork", "save"))
            param = self._rng.choice(self._params)
            if what == "parameter":
                param.read(exactly=True)
            elif what == "gradient":
                self._read_gradients(self._rng.sample(self._params, self._rng.randint(1, len(self._params))))
            elif what == "state":
                self._rng.choice(self._optimizers).state_is_read()
            else:
                for session in self.sessions:
                    session.updates.settle()
                if what == "fork":
                    self._all_are_current(self._params)

    def _read_gradients(self, params: Sequence[Param]) -> None:
        """One operation on several gradients, such as a norm of all."""
        for session in self.sessions:
            of_it = [param for param in params if param.session is session]
            of_it = [param for param in of_it if param.tracked.phase in (Phase.AWAITED, Phase.DEFERRED)]

            def read(of_it: Sequence[Param] = of_it) -> None:
                for param in of_it:
                    if not param.has_sum:
                        raise WrongError(f"the gradient of {param.tracked.name} is read before its sum has arrived")

            session.updates.read([param.tracked for param in of_it], read)

    @staticmethod
    def _all_are_current(params: Iterable[Param]) -> None:
        for param in params:
            if param.value != param.done:
                raise WrongError(f"{param.tracked.name} is of step {param.value} in a child process, expected {param.done}")

    # -- others -------------------------------------------------------------------------------------

    def _read(self) -> None:
        """A thread that reads, while another one trains."""
        with contextlib.suppress(FailedError):
            for _ in range(100):
                if self._has_ended:
                    break
                self.threads.wait(lambda: True)
                param = self._rng.choice(self._params)
                if self._rng.random() < 0.8:
                    param.read(exactly=False)
                elif param.tracked.phase is not Phase.SENT:
                    param.session.updates.settle()

    def _signal(self) -> None:
        """A signal comes at a line: its handler runs where `interruptions.py` lets it, and reads all parameters."""
        if self._rng.random() > 0.01 or self.turn.is_here or self.stepping is not None or self._has_ended:
            return
        with contextlib.suppress(FailedError):
            for param in self._params:
                param.read(exactly=False)
