"""Log: what a Dispatcher was told and what it answered, and a check that a fresh one answers the
same.

A Dispatcher has no clock, thread or I/O, so that its answers follow from its plan and the facts
alone. Replaying the log of a live run shows it: a fresh Dispatcher, told the same facts, starts the
same messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain

from gradlane.core.plan import Plan
from gradlane.core.records.dispatch_log import Fact, Log, What
from gradlane.schedule.dispatcher import Dispatcher
from gradlane.schedule.native import NativeDispatcher


class LoggedDispatcher(NativeDispatcher):
    """A native Dispatcher that keeps a log of its last `iterations` iterations. Earlier iterations have no
    effect on those.

    Its driver owns it alone, as any Dispatcher, and takes the `log` between two facts.
    """

    def __init__(self, plan: Plan, *, follow: bool = False, iterations: int = 20) -> None:
        super().__init__(plan, follow=follow)
        self._follow = follow
        self._facts: deque[list[Fact]] = deque(maxlen=iterations)
        self.ready = self._noting("ready", self.ready)
        self.finished = self._noting("finished", self.finished)
        self.allow = self._noting("allow", self.allow)

    @property
    def log(self) -> Log:
        """The log of the iterations that are kept."""
        return Log(self.plan, tuple(chain.from_iterable(self._facts)), self._follow)

    def begin(self) -> None:
        super().begin()
        self._facts.append([Fact("begin", -1, ())])

    def _noting(self, what: What, tell: Callable[[int], list[int]]) -> Callable[[int], list[int]]:
        def tell_and_note(subject: int) -> list[int]:
            starts = tell(subject)
            self._facts[-1].append(Fact(what, subject, tuple(starts)))
            return starts

        return tell_and_note


def replay(log: Log) -> None:
    """Tell fresh Dispatchers all facts of a log, and check their answers: the specification and the
    native one.

    Args:
        log: what to replay.

    Raises:
        AssertionError: an answer differs from the log's; the text names the fact and both answers.
    """
    for kind in (Dispatcher, NativeDispatcher):
        _replay(log, kind(log.plan, follow=log.follow))


def _replay(log: Log, dispatcher: Dispatcher | NativeDispatcher) -> None:
    iteration = -1
    for place, fact in enumerate(log.facts):
        iteration += fact.what == "begin"
        starts = tuple(_tell(dispatcher, fact))
        assert starts == fact.starts, (
            f"fact {place}, in iteration {iteration} of the log: on {fact.what} {fact.subject} the log starts {fact.starts}, "
            f"the replay {starts}; {dispatcher.describe_state()}"
        )


def _tell(dispatcher: Dispatcher | NativeDispatcher, fact: Fact) -> list[int]:
    match fact.what:
        case "begin":
            dispatcher.begin()
            return []
        case "ready":
            return dispatcher.ready(fact.subject)
        case "finished":
            return dispatcher.finished(fact.subject)
        case "allow":
            return dispatcher.allow(fact.subject)
