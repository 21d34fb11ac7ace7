"""Log: what a Dispatcher was told and what it answered, and a check that a fresh one answers the
same.

A Dispatcher has no clock, thread or I/O, so that its answers follow from its plan and the facts
alone. Replaying the log of a live run shows it: a fresh Dispatcher, told the same facts, starts the
same messages.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

from gradlane.core.plan import Plan
from gradlane.core.records.dispatch_log import Fact, Log, What
from gradlane.schedule.dispatcher import Dispatcher


class LoggedDispatcher(Dispatcher):
    """A Dispatcher that keeps a log of its last `iterations` iterations. Earlier iterations have no
    effect on those.

    Its driver owns it alone, as any Dispatcher, and takes the `log` between two facts.
    """

    def __init__(self, plan: Plan, *, follow: bool = False, iterations: int = 20) -> None:
        super().__init__(plan, follow=follow)
        self._follow = follow
        self._facts: deque[list[Fact]] = deque(maxlen=iterations)

    @property
    def log(self) -> Log:
        """The log of the iterations that are kept."""
        return Log(self.plan, tuple(chain.from_iterable(self._facts)), self._follow)

    def begin(self) -> None:
        super().begin()
        self._facts.append([Fact("begin", -1, ())])

    def ready(self, tensor: int) -> list[int]:
        return self._noted("ready", tensor, super().ready(tensor))

    def finished(self, message: int) -> list[int]:
        return self._noted("finished", message, super().finished(message))

    def allow(self, message: int) -> list[int]:
        return self._noted("allow", message, super().allow(message))

    def _noted(self, what: What, subject: int, starts: list[int]) -> list[int]:
        self._facts[-1].append(Fact(what, subject, tuple(starts)))
        return starts


def replay(log: Log) -> None:
    """Tell a fresh Dispatcher all facts of a log, and check its answers.

    Args:
        log: what to replay.

    Raises:
        AssertionError: an answer differs from the log's; the text names the fact and both answers.
    """
    dispatcher = Dispatcher(log.plan, follow=log.follow)
    iteration = -1
    for place, fact in enumerate(log.facts):
        iteration += fact.what == "begin"
        starts = tuple(_tell(dispatcher, fact))
        assert starts == fact.starts, (
            f"fact {place}, in iteration {iteration} of the log: on {fact.what} {fact.subject} the log starts {fact.starts}, "
            f"the replay {starts}; {dispatcher.describe_state()}"
        )


def _tell(dispatcher: Dispatcher, fact: Fact) -> list[int]:
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
