"""A Dispatcher's answers follow from its plan and what it is told: a log of any run, told to a fresh one, gives the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.cluster import Cluster, RateStep
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Lane
from gradlane.planning.plans import make_plan
from gradlane.schedule import Log, LoggedDispatcher, replay
from gradlane.sim import Job, simulate, simulate_heterogeneous, simulate_jobs, simulate_servers
from tests.unit.strategies import carried, chain, clusters, networks, plans, profiles

over_all_reduce = pytest.mark.parametrize("name", policies.names("all-reduce"))
over_servers = pytest.mark.parametrize("name", policies.names("server"))
SMALL = profiles(max_tensors=10, max_elements=40_000)


@contextmanager
def logged() -> Iterator[list[LoggedDispatcher]]:
    """The Dispatchers of the simulations that are run meanwhile, all of which keep a log."""
    made: list[LoggedDispatcher] = []

    def make(plan, **options):
        made.append(LoggedDispatcher(plan, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradlane.sim.worker.Dispatcher", make)
        yield made


def check(made: list[LoggedDispatcher], plan, dispatchers: int, iterations: int) -> None:
    """Each message was started once an iteration (twice, where split), and every log, written and read, replays."""
    assert len(made) == dispatchers
    starts = sorted([*range(len(plan.messages)), *plan.second_phases] * iterations)
    for dispatcher in made:
        log = dispatcher.log
        assert sorted(start for fact in log.facts for start in fact.starts) == starts
        read = msgspec.json.decode(msgspec.json.encode(log), type=Log)
        assert read == log
        replay(read)


@over_all_reduce
@settings(max_examples=10, deadline=None)
@given(profile=SMALL, network=networks(), ahead=st.booleans())
def test_all_reduce_among_workers_that_are_alike(name, profile, network, ahead):
    plan = make_plan(policies.get(name), profile, Place(network, coordinated=not ahead))
    with logged() as made:
        simulate(plan, profile, network)
    check(made, plan, dispatchers=1, iterations=3)


@over_all_reduce
@settings(max_examples=5, deadline=None)
@given(profile=SMALL, percent=st.lists(st.integers(50, 300), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_all_reduce_among_unlike_workers_on_a_network_that_changes(name, profile, percent, seed):
    network = Network.line(len(percent), 20_000, 10**9)
    plan = make_plan(policies.get(name), profile, Place(network))
    steps = (RateStep(1_000_000, 10**7), RateStep(3_000_000, 10**10))
    with logged() as made:
        simulate_heterogeneous(plan, profile, network, compute_percent=percent, steps=steps, jitter=0.3, seed=seed)
    check(made, plan, dispatchers=len(percent), iterations=3)


@over_servers
@settings(max_examples=5, deadline=None)
@given(profile=SMALL, workers=st.integers(1, 4), startup=st.sampled_from([0, 30_000]))
def test_servers_beside_workers_that_are_alike(name, profile, workers, startup):
    cluster = Cluster.homogeneous(workers, workers, 10**9, colocated=True, startup_ns=startup)
    plan = make_plan(policies.get(name), profile, Place.of(cluster))
    with logged() as made:
        simulate_servers(plan, profile, cluster)
    check(made, plan, dispatchers=1, iterations=3)


@over_servers
@settings(max_examples=10, deadline=None)
@given(profile=SMALL, data=st.data(), staleness=st.sampled_from([0, 1, None]))
def test_servers_of_any_kind_among_unlike_workers(name, profile, data, staleness):
    cluster = data.draw(clusters(name))
    plan = make_plan(policies.get(name), profile, Place.of(cluster))
    with logged() as made:
        timelines = simulate_servers(plan, profile, cluster, 2, staleness=staleness, jitter=0.2)
    check(made, plan, dispatchers=len(timelines), iterations=2)


def test_jobs_that_share_servers_have_logs_of_their_own():
    cluster = Cluster.homogeneous(2, 2, 10**8, colocated=True)
    made_for = []
    for size in (400, 4_000):
        profile = chain((10, size, 3, 20), (50, 3 * size, 3, 20))
        for name in carried(cluster):
            made_for.append(Job(make_plan(policies.get(name), profile, Place.of(cluster)), profile, workers=(0, 1)))
    with logged() as made:
        simulate_jobs(made_for, cluster, 2)
    assert len(made) == 2 * len(made_for)
    for job in made_for:
        check([each for each in made if each.plan is job.plan], job.plan, dispatchers=2, iterations=2)


@settings(max_examples=100, deadline=None)
@given(plan=plans(), follow=st.booleans(), data=st.data())
def test_any_plan_in_any_order_of_facts_told_or_followed(plan, follow, data):
    dispatcher = LoggedDispatcher(plan, follow=follow)
    for _ in range(2):
        dispatcher.begin()
        tensors, orders = set(range(len(plan.tensors))), list(range(len(plan.messages))) if follow else []
        while tensors or orders or dispatcher.in_flight:
            facts = [(dispatcher.ready, each) for each in sorted(tensors)]
            facts += [(dispatcher.finished, each) for each in sorted(dispatcher.in_flight)]
            facts += [(dispatcher.allow, each) for each in orders]
            tell, subject = data.draw(st.sampled_from(facts))
            tell(subject)
            tensors -= {subject} if tell == dispatcher.ready else set()
            if tell == dispatcher.allow:
                orders.remove(subject)
        assert dispatcher.done
    check([dispatcher], plan, dispatchers=1, iterations=2)


# -- what a log is good for -----------------------------------------------------------------------------------

PROFILE = chain(*[(10, 400, 0, 5)] * 4)
NETWORK = Network.line(2, 5, 10**9)


def a_log() -> Log:
    with logged() as made:
        simulate(make_plan(policies.get("p3", slice_bytes=80), PROFILE, Place(NETWORK, coordinated=True)), PROFILE, NETWORK)
    return made[0].log


def test_another_answer_is_found_with_its_place():
    log = a_log()
    place = next(place for place, fact in enumerate(log.facts) if fact.what == "finished" and fact.starts)
    fact = log.facts[place]
    wrong = (*log.facts[:place], msgspec.structs.replace(fact, starts=()), *log.facts[place + 1 :])
    words = rf"^fact {place}, in iteration 0 of the log: on finished {fact.subject} the log starts \(\), the replay \(\d+,\)"
    with pytest.raises(AssertionError, match=words):
        replay(Log(log.plan, wrong))


def test_a_log_of_another_plan_is_found_out():
    log = a_log()
    wider = msgspec.structs.replace(log.plan, lanes=(Lane(),))
    with pytest.raises(AssertionError, match="the replay"):
        replay(Log(wider, log.facts))


def test_only_the_last_iterations_are_kept_and_replay_by_themselves():
    plan = make_plan(policies.get("dear"), PROFILE, Place(NETWORK))
    dispatcher = LoggedDispatcher(plan, iterations=2)
    for _ in range(5):
        dispatcher.begin()
        for tensor in range(len(plan.tensors)):
            dispatcher.ready(tensor)
        while dispatcher.in_flight:
            dispatcher.finished(min(dispatcher.in_flight))
    log = dispatcher.log
    assert [fact.what for fact in log.facts].count("begin") == 2
    assert log.facts[0].what == "begin"
    replay(log)
    dispatcher.begin()
    assert dispatcher.ready(0) == list(dispatcher.log.facts[-1].starts)
    replay(dispatcher.log)  # while an iteration is under way
