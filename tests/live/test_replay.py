"""What the Dispatcher of a live session decided follows from its plan and the facts: every log can be replayed."""

from __future__ import annotations

import pytest

from gradlane.core import files
from gradlane.core.backends import BACKENDS
from gradlane.planning import catalog
from gradlane.schedule import Fact, Log, replay

pytestmark = pytest.mark.matrix

ORDERS: list[dict[str, str]] = [
    *({"backend": backend} for backend in BACKENDS),
    {"order": "coordinator"},
]


def _cases():
    for options in ORDERS:
        for name in catalog.names(options.get("backend", "all-reduce")):
            yield pytest.param(name, options, id="-".join((name, *options.values())))


@pytest.mark.parametrize(("name", "options"), list(_cases()))
def test_a_live_run_can_be_replayed(two_ranks, name, options):
    for rank, log in enumerate(two_ranks.run("tests.live.logged:train", policy=name, **options)):
        iterations = sum(fact.what == "begin" for fact in log.facts)
        assert iterations == 4
        assert log.follow == ("order" in options and rank == 1)
        started = [message for fact in log.facts for message in fact.starts]
        assert len(started) == iterations * (len(log.plan.messages) + len(log.plan.second_phases))
        replay(log)
        with pytest.raises(AssertionError, match="the replay"):
            replay(_with_one_answer_changed(log))
        assert files.loads(files.dumps(log), Log) == log


def _with_one_answer_changed(log: Log) -> Log:
    facts = list(log.facts)
    place = next(place for place, fact in enumerate(facts) if fact.starts)
    facts[place] = Fact(facts[place].what, facts[place].subject, facts[place].starts[1:])
    return Log(log.plan, tuple(facts), log.follow)


def test_a_log_that_is_not_kept_is_refused_with_what_to_do(two_ranks):
    for said in two_ranks.run("tests.live.logged:asks_for_a_log_that_is_not_kept"):
        assert said == "no log is kept: pass keep_log=True to gradlane.attach"
