"""Plans whose tensors have owners: what they may say, what their second phases wait for, and what the policy makes of them."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.core import files
from gradlane.core.backends import why_not
from gradlane.core.bus import Bus
from gradlane.core.checks import check_plan
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Lane, Message, Ownership, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.errors import InputError, PlanError
from gradlane.planning import catalog
from gradlane.planning.plans import behind_barrier, make_plan, when_clipping
from gradlane.planning.ranking import Question, rank
from gradlane.schedule import Dispatcher, NativeDispatcher
from gradlane.sim import iteration_ns, simulate
from gradlane.sim.servers import simulate_servers
from gradlane.testing.generators import profile_of, profiles

MIB = 2**20


def owned(*groups: tuple[int, ...], ranks: tuple[int, ...], size: int = 4, one_phase: tuple[int, ...] = (), **fields) -> Plan:
    """A message a group of tensors of `size` bytes, all in two phases but those in `one_phase`."""
    specs = tuple(TensorSpec(f"t{index}", size) for index in range(len(ranks)))
    messages = tuple(
        Message(
            tuple(Slice(tensor, 0, size) for tensor in group), priority=len(groups) - place, two_phase=place not in one_phase
        )
        for place, group in enumerate(groups)
    )
    return Plan("test", "test", specs, messages, owners=Ownership(ranks), **fields)


# -- what a plan may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: owned((0,), (1,), ranks=(0, 1, 0)), None),
        (lambda: Ownership((0,), order=65), "owners.order: got 65, expected an integer from 0 to 64"),
        (lambda: Ownership((-1,)), "owners.ranks: got -1"),
        (lambda: owned((0, 1), ranks=(1, 0)), r"messages\[0\]: got \[1, 0\], expected tensors in the order of their owners"),
        (
            lambda: msgspec.structs.replace(owned((0,), ranks=(0,)), owners=Ownership((0, 1))),
            "owners.ranks: got '2 of them', expected 1",
        ),
        (
            lambda: msgspec.structs.replace(
                owned((0,), ranks=(0,), size=8),
                messages=(Message((Slice(0, 0, 4),), two_phase=True), Message((Slice(0, 4, 4),), two_phase=True)),
            ),
            r"messages\[0\]: got 4, expected a whole tensor, 8 bytes",
        ),
        (lambda: owned((0,), (1,), ranks=(0, 1), sequence=(0, 1, 1)), "sequence: got 'message 1 last', expected a first phase"),
        (
            lambda: owned((0,), (1,), ranks=(0, 1), one_phase=(0,), sequence=(0, 0, 1)),
            "sequence: got 'message 0 twice', expected it once",
        ),
        (lambda: owned((0,), (1,), ranks=(0, 1), sequence=(0, 0, 0, 1)), "sequence: got '4 entries'"),
    ],
)
def test_what_contradicts_itself_is_refused(make, said):
    if said is None:
        plan = make()
        with pytest.raises(PlanError, match="t2: moves 0 bytes"):
            check_plan(plan, plan.tensors)
        return
    with pytest.raises(InputError, match=said):
        make()


def test_a_tensor_may_be_cut_where_its_message_has_one_phase():
    specs = (TensorSpec("a", 8), TensorSpec("b", 4))
    halves = (Message((Slice(0, 0, 4),)), Message((Slice(0, 4, 4),)), Message((Slice(1, 0, 4),), two_phase=True))
    check_plan(Plan("test", "test", specs, halves, owners=Ownership((1, 0))), specs)


def test_owners_are_in_the_file_and_in_the_fingerprint_and_other_plans_have_none():
    plan = owned((0,), (1,), ranks=(0, 1), sequence=(0, 0, 1))
    assert files.loads(files.dumps(plan), Plan) == plan
    other = msgspec.structs.replace(plan, owners=Ownership((0, 1), order=1))
    assert other.fingerprint != plan.fingerprint
    assert b"owners" not in files.dumps(msgspec.structs.replace(plan, owners=msgspec.UNSET, sequence=(0, 1)))


@pytest.mark.parametrize(("order", "norm"), [(2, 2.0), (1, 1.0), (0, math.inf)])
def test_the_order_of_norms_is_a_number_of_torchs(order, norm):
    plan = msgspec.structs.replace(owned((0,), ranks=(0,)), owners=Ownership((0,), order))
    assert plan.tells_norms(norm)
    assert not plan.tells_norms(norm + 1 if norm < math.inf else 2.0)
    assert not plan.tells_norms(None)


def test_a_message_that_owners_share_unevenly_takes_as_long_as_its_largest_part_for_all():
    plan = owned((0, 2, 1), (3,), (4,), ranks=(0, 1, 0, 1, 0), one_phase=(2,))
    assert [plan.sum_bytes(index, 2) for index in range(3)] == [16, 8, 4]  # 8 of 12 bytes, all of 4, and one phase
    assert plan.sum_bytes(0, 4) == 32
    assert msgspec.structs.replace(plan, owners=msgspec.UNSET).sum_bytes(0, 4) == 12


def test_what_knows_no_owners_refuses_them():
    plan = owned((0,), ranks=(0,))
    assert why_not(plan, "all-reduce") is None
    assert why_not(plan, "server") is None
    assert "its tensors have owners, which are ranks" in str(why_not(plan, "server", external=True))
    assert why_not(plan, "all-reduce", in_stream=True) is None
    windowed = msgspec.structs.replace(plan, lanes=(Lane(window_bytes=8),))
    assert why_not(windowed, "all-reduce") is None
    assert "would wait for one another for ever" in str(why_not(windowed, "server"))
    hosts = msgspec.structs.replace(Network.line(4, 10, 10**9), bus=Bus(2, 10, 10**9))
    with pytest.raises(PlanError, match="which sums within hosts first do not know; expected one worker a host"):
        make_plan(catalog.get("owners"), profile_of((10, 4)), Place(hosts))


# -- second phases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Dispatcher, NativeDispatcher])
def test_a_second_phase_starts_at_its_place_or_when_all_first_phases_have_ended(kind):
    plan = owned((0,), (1,), (2,), ranks=(0, 1, 0), sequence=(0, 1, 0, 2))
    assert plan.early_second_phases == (0,)
    assert plan.late_second_phases == (2, 1)  # the last is the most urgent
    assert plan.second_phases == (0, 2, 1)
    assert plan.starts == ((0, False), (1, False), (0, True), (2, False))
    dispatcher = kind(plan)
    for _ in range(2):
        dispatcher.begin()
        assert [dispatcher.ready(tensor) for tensor in range(3)] == [[0], [1], []]  # 2 waits for the second phase of 0
        assert dispatcher.finished(1) == []
        assert dispatcher.finished(0) == [0, 2]
        assert dispatcher.finished(0) == []
        assert dispatcher.finished(2) == [2, 1]
        assert not dispatcher.done
        assert [dispatcher.finished(message) for message in (1, 2)] == [[], []]
        assert dispatcher.done


@st.composite
def plans_with_owners(draw: st.DrawFn) -> Plan:
    """Whole tensors in messages of one or two phases, some of whose second phases have places among the first ones."""
    tensors = draw(st.integers(1, 8))
    ranks = tuple(draw(st.lists(st.integers(0, 3), min_size=tensors, max_size=tensors)))
    left = draw(st.permutations(range(tensors)))
    groups = []
    while left:
        taken = draw(st.integers(1, len(left)))
        groups.append(tuple(sorted(left[:taken], key=lambda tensor: ranks[tensor])))
        left = left[taken:]
    one_phase = tuple(place for place in range(len(groups)) if draw(st.booleans()))
    first = draw(st.permutations(range(len(groups))))
    sequence = list(first)
    for place, message in enumerate(first):
        if message not in one_phase and message != first[-1] and draw(st.booleans()):
            behind = draw(st.integers(place + 1, len(first) - 1))
            sequence.insert(sequence.index(first[behind]), message)
    return owned(*groups, ranks=ranks, one_phase=one_phase, sequence=tuple(sequence))


@settings(max_examples=200, deadline=None)
@given(plan=plans_with_owners(), random=st.randoms(use_true_random=False))
def test_in_any_history_both_dispatchers_start_every_phase_once_and_in_one_order(plan, random):
    def history(kind: type[Dispatcher | NativeDispatcher], random: Random) -> list[tuple[int, bool]]:
        dispatcher = kind(plan)
        dispatcher.begin()
        coming, in_flight, started, ended = list(range(len(plan.tensors))), [], [], set()
        random.shuffle(coming)
        while coming or in_flight:
            if coming and (not in_flight or random.random() < 0.5):
                starts = dispatcher.ready(coming.pop())
            else:
                message = in_flight.pop(random.randrange(len(in_flight)))
                ended.add((message, dispatcher.in_second_phase(message)))
                starts = dispatcher.finished(message)
            for start in starts:
                is_second = dispatcher.in_second_phase(start)
                if is_second:
                    needed = [start] if start in plan.early_second_phases else range(len(plan.messages))
                    assert ended >= {(message, False) for message in needed}
                started.append((start, is_second))
            in_flight += starts
        assert dispatcher.done
        return started

    seed = random.random()
    expected = [*plan.starts, *((message, True) for message in plan.late_second_phases)]
    assert history(Dispatcher, Random(seed)) == history(NativeDispatcher, Random(seed)) == expected


def test_second_phases_wait_for_the_norms_and_the_next_pass_for_the_second_phase_of_its_layer():
    # gradients of 1,000,000 bytes at 1 and 2 ms; a byte takes a nanosecond, and each phase half of 10 us + 1 ms
    profile = profile_of((1_000_000, 10**6), (2_000_000, 10**6), layers=[1, 0], forward_ns=100_000)
    network = Network.line(2, 10_000, 10**9)
    specs = profile.specs
    messages = tuple(Message((Slice(index, 0, 10**6),), priority=1 - index, two_phase=True) for index in range(2))
    owners = Ownership((0, 1))
    plan = Plan("test", "test", specs, messages, crosses_barrier=True, owners=owners).with_sequence((0, 1))
    timeline = simulate(plan, profile, network, 2)
    phase_ns = (10_000 + 2 * 10**6) // 2  # one rank owns all of each message, so that it takes twice as long
    norms_ns = 10_000 + (2 * 2 + 2) * 8  # of two tensors two norms, of two ranks a factor
    begins_ns = next(span.start_ns for span in timeline.of("backward") if span.iteration == 0)
    reduced_ns = begins_ns + 1_000_000 + 2 * phase_ns
    ends = {span.subject: span.end_ns for span in timeline.of("receive") if span.iteration == 0}
    assert ends == {1: reduced_ns + norms_ns + phase_ns, 0: reduced_ns + norms_ns + 2 * phase_ns}
    uses = {span.subject: span.start_ns for span in timeline.of("use") if span.iteration == 1}
    assert uses == {1: ends[1], 0: ends[0]}


def test_over_servers_norms_wait_for_all_sums_of_their_owners_and_second_phases_for_the_norms():
    # two hosts with a server each: a byte of a message takes half a nanosecond, as half of it stays on its host
    cluster = Cluster.homogeneous(2, 2, 10**9, colocated=True, startup_ns=1000)
    plan = owned((0, 1), (2,), ranks=(0, 1, 0), size=4000, one_phase=(1,))
    profile = profile_of((0, 4000), (0, 4000), (0, 4000))
    for whole in (False, True):
        timelines = simulate_servers(plan, profile, cluster, 2, whole=whole)
        received = [{span.subject: span.end_ns for span in each.of("receive") if span.iteration == 0} for each in timelines]
        norms_ns = max(ends[1] for ends in received) + 2 * (1000 + (2 * 3 + 2) * 8)  # a sum that comes in one phase comes last
        assert [ends[0] for ends in received] == [norms_ns + 1000 + 4000] * len(received)
        with pytest.raises(PlanError, match="got rank 1 as an owner, expected one of 1 ranks"):
            simulate_servers(plan, profile, Cluster.homogeneous(1, 1, 10**9, colocated=True))


# -- the policy ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(profile=profiles(), workers=st.integers(2, 8), least=st.integers(8, 2000), most=st.integers(8, 4000))
def test_every_tensor_has_one_owner_and_owners_share_what_they_can(profile, workers, least, most):
    policy = catalog.get("owners", least_bytes=least, most_bytes=most)
    network = Network.line(workers, 1000, 10**9)
    plan = policy.plan(profile, network)
    check_plan(plan, profile.specs)
    assert len(plan.owners.ranks) == len(profile.tensors)
    assert max(plan.owners.ranks) < workers
    for message in plan.messages:
        if not message.two_phase:
            (piece,) = message.slices
            assert piece.size_bytes * workers > most  # larger than an equal share of the largest message
    early = [index for index, is_second in plan.starts if is_second]
    assert len(set(early)) == len(early)


def test_equal_layers_are_shared_equally_and_their_messages_are_not_smaller_than_asked():
    profile = profile_of(*((1000 * (index + 1), MIB) for index in range(8)))
    plan = catalog.get("owners", least_bytes=2 * MIB, most_bytes=4 * MIB).plan(profile, Network.line(2, 10, 10**9))
    assert [message.size_bytes for message in plan.messages] == [2 * MIB] * 4
    assert [plan.sum_bytes(index, 2) for index in range(4)] == [2 * MIB] * 4
    assert plan.owners.ranks == (0, 1) * 4


def test_second_phases_fill_the_time_in_which_the_network_has_nothing_to_do():
    # a message of two tensors every 10 ms, of which each phase takes 1 ms: all second phases fit but that of the last
    profile = profile_of(*((10_000_000 * (index // 2 + 1), MIB) for index in range(6)))
    knobs = {"least_bytes": 2 * MIB, "most_bytes": 2 * MIB}
    plan = catalog.get("owners", **knobs).plan(profile, Network.line(2, 10, 2 * 10**9))
    assert plan.sequence == (0, 0, 1, 1, 2)
    busy = profile_of(*((1_000 * (index // 2 + 1), MIB) for index in range(6)))
    assert catalog.get("owners", **knobs).plan(busy, Network.line(2, 10, 2 * 10**9)).sequence is None


def test_a_place_with_a_coordinator_has_no_second_phase_before_the_end():
    profile = profile_of(*((10_000_000 * (index // 2 + 1), MIB) for index in range(6)))
    policy = catalog.get("owners", least_bytes=2 * MIB, most_bytes=2 * MIB)
    plan = make_plan(policy, profile, Place(Network.line(2, 10, 2 * 10**9), coordinated=True))
    assert (plan.sequence, plan.early_second_phases) == (None, ())


# -- who asks for it -----------------------------------------------------------------------------------------------

# twenty layers of 1 MiB each way in 100 ms, whose sums take 120 ms
LAYERS = profile_of(*((5_000_000 * (index + 1), MIB) for index in range(20)), forward_ns=2_500_000)
NETWORK = Network.line(2, 100_000, 20 * MIB * 1000 // 120)


def asked(**question) -> list[str]:
    answer = rank(Question(LAYERS, (Place(NETWORK),), look=0, most=5, budget_ns=60 * 10**9, **question))
    return [each.choice.policy for each in answer.worth_trying]


def test_a_script_that_reads_norms_alone_is_ranked_with_owners_across_the_barrier_and_the_rest_behind_it():
    assert asked(crosses=False, clips=2.0)[0] == "owners"
    answer = rank(Question(LAYERS, (Place(NETWORK),), look=0, most=5, budget_ns=60 * 10**9, crosses=False, clips=2.0))
    for each in answer.predicted[:8]:
        plan = make_plan(catalog.get(each.choice.policy, **each.choice.knobs), LAYERS, Place(NETWORK))
        carried = plan if each.choice.policy == "owners" else behind_barrier(plan)
        assert when_clipping(plan, 2.0) == carried
        assert each.iteration_ns == iteration_ns(carried, LAYERS, NETWORK)


def test_norms_are_told_to_nobody_who_does_not_ask_and_in_the_order_that_is_asked_for():
    assert "owners" not in asked(crosses=False)
    assert "owners" not in asked(crosses=True)
    assert "owners" not in asked(crosses=False, clips=2.5)
    answer = rank(Question(LAYERS, (Place(NETWORK),), look=0, most=5, budget_ns=60 * 10**9, crosses=False, clips=math.inf))
    orders = {each.plan.owners.order for each in answer.worth_trying if each.choice.policy == "owners"}
    assert orders == {0}


def test_messages_are_in_the_order_of_readiness():
    plan = make_plan(catalog.get("owners"), LAYERS, Place(NETWORK))
    last = [max(message.tensors) for message in plan.messages]
    assert all(before < behind for before, behind in pairwise(last))
