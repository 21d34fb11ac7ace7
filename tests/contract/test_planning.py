"""One profile, one plan, whoever asks; and what nothing can carry out is refused in the same words, simulated and live."""

from __future__ import annotations

import json
import re

import pytest
from msgspec import structs

from gradlane.core import files
from gradlane.core.cluster import Cluster
from gradlane.core.collectives import all_reduce
from gradlane.core.place import Place
from gradlane.core.policy import replans, wire_over_servers
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import InputError, PlanError
from gradlane.planning import catalog
from gradlane.planning.plans import accepted, make_plan
from gradlane.planning.questions import Case, judge, judge_plan, sweep
from gradlane.planning.ranking import Question, rank
from gradlane.planning.searched import starting_plans
from gradlane.policies.prophet import Prophet
from gradlane.sim import iteration_ns, planned_ahead, simulate, simulate_heterogeneous, simulate_servers
from tests.commands import invoke

MS, KIB = 10**6, 2**10
# the gradients of a step become ready one after another, as they are measured; the steps end at 13, 53 and 100 ms
READY_MS = (10, 11, 12, 13, 50, 51, 53, 98, 99, 100)
PROFILE = Profile(
    "measured",
    "none",
    tuple(TensorProfile(TensorSpec(f"t{n}", (64 + 512 * (n % 3)) * KIB), at * MS, 9 - n) for n, at in enumerate(READY_MS)),
    tuple(Layer(f"l{n}", 5 * MS) for n in range(10)),
    100 * MS,
)
RATE = 10**9 // 8
OPTIONS = ["--rate", "1gbit", "--workers", "4"]
NETWORK = all_reduce("ring", 4, startup_ns=30_000, bytes_per_second=RATE)  # what the options say
ON_WORKERS = Cluster.homogeneous(4, 4, RATE, colocated=True, startup_ns=30_000)
APART = Cluster.homogeneous(4, 2, RATE, startup_ns=30_000)
PLACES = [
    (NETWORK, [], Place(NETWORK)),
    (ON_WORKERS, ["--servers", "same", "--colocated"], Place(ON_WORKERS.as_network(), "server")),
    (APART, ["--servers", "2"], Place(APART.as_network(), "server", servers=2)),
]
CARRIED = [
    pytest.param(name, *place, id=f"{name}-{place[2].backend}-{place[2].servers}")
    for place in PLACES
    for name in catalog.names(place[2].backend, place[2].has_external_servers)
    if name != "searched"  # which takes seconds
]
NOT_CARRIED = [
    pytest.param(name, *place, id=f"{name}-{place[2].backend}-{place[2].servers}")
    for place in PLACES
    for name in sorted(set(catalog.names()) - set(catalog.names(place[2].backend, place[2].has_external_servers)))
]


@pytest.fixture
def profile_file(tmp_path):
    files.write(tmp_path / "profile.json", PROFILE)
    return str(tmp_path / "profile.json")


# -- one plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "where", "options", "place"), CARRIED)
def test_every_study_and_every_command_uses_the_plan_of_the_door(profile_file, name, where, options, place):
    plan = make_plan(catalog.get(name), PROFILE, place)
    case = Case(PROFILE, where)
    assert case.place == place
    assert judge(catalog.get(name), case).plan == plan
    assert judge_plan(plan, case).plan == plan
    assert [outcome.plan for outcome in sweep([case], [name])] == [plan]
    said = ["--policy", name, "--json", *OPTIONS, *options]
    rows = json.loads(invoke("plan", profile_file, *said))["policies"]
    rows = [row for row in rows if row["policy"] == name]
    rows += json.loads(invoke("simulate", profile_file, *said))["rows"]
    rows += json.loads(invoke("whatif", "rates", profile_file, *said))["rows"]
    rows += json.loads(invoke("whatif", "workers", profile_file, *said))["rows"]
    assert [row["fingerprint"] for row in rows] == [plan.fingerprint] * 4


@pytest.mark.parametrize(("where", "options", "place"), PLACES)
def test_auto_tries_the_plans_of_the_door(where, options, place):
    answer = rank(Question(PROFILE, (place,), look=0, most=100, budget_ns=60 * 10**9))
    assert answer.worth_trying
    for each in answer.worth_trying:
        assert each.plan == make_plan(catalog.get(each.choice.policy, **each.choice.knobs), PROFILE, place)


def test_searched_is_planned_once_whoever_asks(profile_file):
    policy = catalog.get("searched", moves=50)
    plan = make_plan(policy, PROFILE, Place(NETWORK))
    assert judge(policy, Case(PROFILE, NETWORK)).plan == plan
    said = invoke("plan", profile_file, "--policy", "searched", "--knob", "moves=50", "--json", *OPTIONS)
    rows = json.loads(said)["policies"]
    assert plan.fingerprint in [row["fingerprint"] for row in rows]


def test_searched_begins_from_the_plans_of_the_door():
    begins = starting_plans(PROFILE, NETWORK)
    names = [name for name in catalog.names("all-reduce") if name not in ("searched", "owners")]
    assert begins[: len(names)] == [make_plan(catalog.get(name), PROFILE, Place(NETWORK)) for name in names]


def test_prophet_plans_from_steps_whoever_shows_it_the_profile():
    # as one step each three blocks at most leave before the end; gradient by gradient it would be up to nine
    held = {message.hold_until for message in make_plan(catalog.get("prophet"), PROFILE, Place(NETWORK)).messages}
    assert held == {3, 6, 9}


@pytest.mark.parametrize("name", catalog.names())
def test_prophet_alone_asks_to_plan_again(name):
    assert replans(catalog.get(name)) == (name == Prophet.name)


# -- the order ------------------------------------------------------------------------------------------------


def test_the_order_is_fixed_ahead_where_ranks_must_share_one_and_no_coordinator_decides_it():
    policy = catalog.get("bytescheduler")
    plan = policy.plan(PROFILE, NETWORK)
    assert plan.sequence is None
    assert make_plan(policy, PROFILE, Place(NETWORK)) == planned_ahead(plan, PROFILE, NETWORK)
    assert make_plan(policy, PROFILE, Place(NETWORK, coordinated=True)) == plan
    assert make_plan(policy, PROFILE, Place(NETWORK, "server")) == structs.replace(plan, wire=wire_over_servers(policy))


def test_a_place_that_contradicts_itself_is_refused():
    with pytest.raises(InputError, match="backend: got 'nccl', expected 'all-reduce' or 'server'"):
        Place(NETWORK, "nccl")
    with pytest.raises(InputError, match="servers: got 2, expected an integer from 0 to 0"):
        Place(NETWORK, servers=2)


def test_a_given_order_is_kept():
    plan = planned_ahead(catalog.get("p3").plan(PROFILE, NETWORK), PROFILE, NETWORK)
    turned = plan.with_sequence(plan.sequence[::-1])
    assert accepted(turned, PROFILE, Place(NETWORK)) == turned


# -- what nothing can carry -----------------------------------------------------------------------------------


def words_of(name: str, place: Place) -> str:
    with pytest.raises(PlanError) as refused:
        make_plan(catalog.get(name), PROFILE, place)
    return str(refused.value)


def test_packets_and_halves_are_what_some_places_cannot_carry():
    refused = {(case.values[0], case.id) for case in NOT_CARRIED}
    assert {name for name, _ in refused} == {"mercury", "mercury-no-preemption", "dear", "owners"}
    assert words_of("mercury", Place(NETWORK)) == (
        "plan mercury: wire 'packet-priority' needs gradlane's own transport, and all-reduce has 'fifo' only; expected servers "
        "(backend='server', simulated: --servers); gradlane policies says which policies all-reduce carries"
    )
    assert words_of("dear", Place(NETWORK, "server", servers=2)) == (
        "plan dear: messages[0] is split into push and pull, and servers in processes of their own return a sum as soon as it "
        "is whole; expected a server in each rank's process (servers=0, simulated: --servers same --colocated); "
        "gradlane policies says which policies server carries"
    )


@pytest.mark.parametrize(("name", "where", "options", "place"), NOT_CARRIED)
def test_what_nothing_can_carry_is_simulated_nowhere_and_refused_in_the_words_of_attach(
    profile_file, name, where, options, place
):
    words, case = words_of(name, place), Case(PROFILE, where)
    assert name not in case.policies
    asks = (
        lambda: judge(catalog.get(name), case),
        lambda: judge_plan(catalog.get(name).plan(PROFILE, place.network), case),
        lambda: sweep([case], [name]),
    )
    for ask in asks:
        with pytest.raises(PlanError, match=f"^{re.escape(words)}$"):
            ask()
    said = [profile_file, "--policy", name, *OPTIONS, *options]
    for command in (["plan"], ["simulate"], ["whatif", "rates"], ["whatif", "workers"]):
        assert words in invoke(*command, *said, code=2).replace("\n", " ")


@pytest.mark.parametrize("name", ["mercury", "mercury-no-preemption"])
def test_the_simulators_of_all_reduce_take_no_packets_from_anybody(name):
    plan = catalog.get(name).plan(PROFILE, NETWORK)
    for simulator in (simulate, simulate_heterogeneous, iteration_ns, planned_ahead):
        with pytest.raises(PlanError, match=f"^{re.escape(words_of(name, Place(NETWORK)))}$"):
            simulator(plan, PROFILE, NETWORK)


def test_the_simulator_of_servers_apart_takes_no_halves_from_anybody():
    plan = catalog.get("dear").plan(PROFILE, NETWORK)
    with pytest.raises(PlanError, match=f"^{re.escape(words_of('dear', Place(NETWORK, 'server', servers=2)))}$"):
        simulate_servers(plan, PROFILE, APART)
    assert simulate_servers(plan, PROFILE, ON_WORKERS)


def test_a_plan_that_leaves_bytes_out_is_refused_where_the_policy_returns_it():
    class Careless:
        name = paper = differs = "careless"

        def plan(self, profile, network):
            whole = catalog.get("wfbp").plan(profile, network)
            return type(whole)("careless", whole.model, whole.tensors, whole.messages[1:])

    with pytest.raises(PlanError, match="t0: moves 0 bytes, expected"):
        make_plan(Careless(), PROFILE, Place(NETWORK))
