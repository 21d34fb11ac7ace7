"""Logs: what the Dispatchers of a simulation were told and answered, and the proof that fresh ones
answer the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import msgspec

from gradlane.core.plan import Plan
from gradlane.schedule import Log, LoggedDispatcher, replay
from gradlane.sim import worker


@contextmanager
def logged_dispatchers() -> Iterator[list[LoggedDispatcher]]:
    """The Dispatchers of the simulations that this thread runs meanwhile, in the order in which
    they are made; each keeps a log.

    It replaces a class in the simulator's modules, so that no other thread may simulate meanwhile.
    """
    made: list[LoggedDispatcher] = []

    def make(plan: Plan) -> LoggedDispatcher:
        made.append(LoggedDispatcher(plan))
        return made[-1]

    with mock.patch.object(worker, "NativeDispatcher", make):
        yield made


def check_logs(made: Sequence[LoggedDispatcher], plan: Plan, *, dispatchers: int, iterations: int) -> None:
    """Raise `AssertionError` unless each Dispatcher started every message once an iteration and its
    log replays.

    A two-phase message is started twice an iteration. Logs are written as JSON and read again
    before they are replayed.

    Args:
        made: Dispatchers of `plan` whose iterations are over.
        plan: the plan that they carried out.
        dispatchers: how many of them there have to be.
        iterations: how many iterations each has run, 20 at most, which is as far back as a log
            goes.
    """
    assert len(made) == dispatchers, f"{len(made)} Dispatchers were made, expected {dispatchers}"
    starts = sorted([*range(len(plan.messages)), *plan.second_phases] * iterations)
    for dispatcher in made:
        log = dispatcher.log
        started = sorted(start for fact in log.facts for start in fact.starts)
        assert started == starts, f"messages started in {iterations} iterations: {started}, expected {starts}"
        read = msgspec.json.decode(msgspec.json.encode(log), type=Log)
        assert read == log, "a log that was written and read is another"
        replay(read)
