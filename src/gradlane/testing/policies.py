"""What every policy promises, wherever its plans are carried out.

def test_my_policy() -> None:
    check_policy(MyPolicy())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from hypothesis import strategies as st

from gradlane.core import files
from gradlane.core.backends import why_not
from gradlane.core.checks import check_plan, check_timeline
from gradlane.core.cluster import Cluster, RateStep
from gradlane.core.fields import need_name
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import KnobRange, Policy, trials, tunable
from gradlane.core.profile import Profile
from gradlane.errors import InputError, PlanError
from gradlane.planning.plans import make_plan
from gradlane.planning.search import Space
from gradlane.sim import iteration_ns, simulate, simulate_heterogeneous, simulate_servers, simulate_steady
from gradlane.sim.bounds import lower_bound_ns
from gradlane.testing import planned_anew
from gradlane.testing.generators import chain, clusters, holds_for, networks, profiles
from gradlane.testing.logs import check_logs, logged_dispatchers

_SMALL = profiles(max_tensors=10, max_elements=40_000)
_EIGHT_LAYERS = chain(*[(2_000_000, 4 * 2**20, 100_000, 1_000_000)] * 8)
_MANY_LAYERS = chain(*[(1_000_000, 2**20, 100_000, 1_000_000)] * 40)
_GIGABIT = Network.line(4, 30_000, 10**9 // 8)
_RATES = (RateStep(1_000_000, 10**7), RateStep(3_000_000, 10**10))
_NO_NUMBERS: tuple[Any, ...] = ("4MiB", True, None, math.nan)


def check_policy(policy: Policy, *, examples: int = 50) -> None:
    """Raise `AssertionError` unless `policy` keeps every promise of a policy.

    - It says what it is: `name`, `paper`, `differs` (`check_description`).
    - Its plans move every byte once. Planned again, also by another policy with the same knobs, they are the same, and so are
      their fingerprints after a file (`check_plans`). So they are in another process (`check_processes`).
    - Its knobs can be written, read and tuned; those it declares tunable refuse values of no use
      (`check_knobs`).
    - All-reduce carries its plans out in the order that is fixed ahead, in no less time than the lower bound
      (`check_all_reduce`). So it does among workers that differ, on a network that changes (`check_heterogeneous`).
    - So do servers beside the workers (`check_servers`) and servers anywhere, in step or not
      (`check_any_servers`). Where servers or all-reduce cannot carry a plan, it is refused with
      `PlanError`.

    Each simulated timeline passes `check_timeline`, and the log of each simulated Dispatcher
    replays.

    Args:
        policy: the policy with the knobs to be checked.
        examples: profiles and networks drawn for each promise; fewer where each is simulated for
            several workers.
    """
    for check in CHECKS:
        check(policy, examples)


def check_description(policy: Policy, examples: int = 1) -> None:
    """Raise `AssertionError` unless the policy has its words for tables, and a name that can be
    typed.
    """
    lacks = [word for word in ("name", "paper", "differs", "plan") if not hasattr(policy, word)]
    assert not lacks, f"{type(policy).__name__} has no {', '.join(lacks)}; see gradlane.core.policy.Policy"
    for word in ("name", "paper", "differs"):
        text = getattr(policy, word)
        with _promise(policy, f"{word} is text for tables"):
            assert isinstance(text, str), f"got {text!r}"
            need_name(word, text)
    assert ":" not in policy.name, f"{_title(policy)}: a name with a colon would be taken for the place of a class"
    replans = getattr(type(policy), "replans", False)
    assert isinstance(replans, bool), f"{_title(policy)}: replans is {replans!r}, expected True or False"


def check_plans(policy: Policy, examples: int = 50) -> None:
    """Raise `AssertionError` unless every plan moves each byte once, is the same again, and can be
    filed.
    """

    def check(profile: Profile, network: Network) -> None:
        given = msgspec.json.encode((profile, network))
        with _promise(policy, "its plan moves every byte of every gradient once"):
            plan = policy.plan(profile, network)
            check_plan(plan, profile.specs)
        with _promise(policy, "it leaves the profile and the network as they are"):
            assert msgspec.json.encode((profile, network)) == given, "it has changed them"
            assert plan.size_bytes == profile.size_bytes, f"it moves {plan.size_bytes} bytes, expected {profile.size_bytes}"
        with _promise(policy, "its plan says whose it is"):
            assert plan.policy == policy.name, f"plan.policy is {plan.policy!r}, expected {policy.name!r}"
            assert plan.model == profile.model, f"plan.model is {plan.model!r}, expected {profile.model!r}"
        with _promise(policy, "the same profile and network give the same plan"):
            for again in (policy, _anew(policy)):
                other = again.plan(profile, network)
                assert other == plan, f"{_first_difference(plan, other)} when planned again"
                assert other.fingerprint == plan.fingerprint, "the fingerprints differ"
        with _promise(policy, "its plan can be written to a file and read"):
            read = files.loads(files.dumps(plan), Plan)
            assert read == plan, _first_difference(plan, read)
            assert read.fingerprint == plan.fingerprint, "the fingerprints differ"

    holds_for(examples, check, profile=profiles(), network=networks())


def check_processes(policy: Policy, examples: int = 1) -> None:
    """Raise `AssertionError` unless another interpreter makes the same plans. It has another seed for the hashes of strings.

    A class that it cannot import, as one inside a function, is not checked.
    """
    cases = [(profile, _GIGABIT) for profile in (_EIGHT_LAYERS, _MANY_LAYERS)]
    with _promise(policy, "another process makes the same plan"):
        anew = planned_anew.fingerprints(policy, cases)
        here = [policy.plan(profile, network).fingerprint for profile, network in cases]
        assert anew in (None, here), f"the fingerprints here are {', '.join(here)}, and there {', '.join(anew or ())}"


def check_knobs(policy: Policy, examples: int = 1) -> None:
    """Raise `AssertionError` unless the fields of a `msgspec.Struct`, which are its knobs, survive being written as
    JSON. Those declared `tunable` must give valid plans at both ends of their ranges, and refuse values out of range.

    A policy that is no `msgspec.Struct` has no knobs, and may declare none.
    """
    ranges = tunable(policy)
    if not isinstance(policy, msgspec.Struct):
        assert not ranges, f"{_title(policy)}: only a msgspec.Struct has knobs to tune; make its class one, with them as fields"
        return
    with _promise(policy, "its knobs can be written as JSON and read"):
        read = msgspec.json.decode(msgspec.json.encode(policy), type=type(policy))
        assert read == policy, f"written {policy}, read {read}"
    if not ranges:
        return
    with _promise(policy, "what it declares tunable are knobs of its own, with their ranges"):
        _check_ranges(policy, ranges)
    with _promise(policy, "its plan is valid at both ends of what it declares tunable"):
        space = Space.of(policy, _EIGHT_LAYERS.specs)
        for corner in (0.0, 1.0):
            at = space.at((corner,) * space.dimensions)
            check_plan(at.plan(_EIGHT_LAYERS, _GIGABIT), _EIGHT_LAYERS.specs)
    for knob, limits in ranges.items():
        for value in (*_NO_NUMBERS, *([-1] if limits.low >= 0 else [])):
            _check_refused(policy, knob, value)


def _check_ranges(policy: msgspec.Struct, ranges: Mapping[str, KnobRange]) -> None:
    for knob, limits in ranges.items():
        assert knob in policy.__struct_fields__, f"{knob} is no field; the fields are {', '.join(policy.__struct_fields__)}"
        assert isinstance(limits, KnobRange), f"{knob}: got {limits!r}, expected a KnobRange"
        assert limits.low <= limits.high, f"{knob}: the range ends at {limits.high}, below its beginning {limits.low}"
        assert limits.step is not None or limits.low > 0, f"{knob}: a size is searched by ratio, from more than 0 bytes"


def _check_refused(policy: msgspec.Struct, knob: str, value: object) -> None:
    title = _title(policy)
    advice = "check it in __post_init__, with gradlane.core.fields.need_int for example"
    try:
        type(policy)(**{**msgspec.structs.asdict(policy), knob: value})
    except InputError as error:
        if knob not in str(error):
            raise AssertionError(f"{title}: knob {knob}={value!r} is refused without its name: {error}") from error
    except Exception as error:
        raise AssertionError(f"{title}: knob {knob}={value!r} raises {error!r}, expected InputError; {advice}") from error
    else:
        raise AssertionError(f"{title}: knob {knob}={value!r} is accepted, expected InputError; {advice}")


def check_all_reduce(policy: Policy, examples: int = 50) -> None:
    """Raise `AssertionError` unless all-reduce carries the plans out, with an order fixed ahead as
    without, or they are refused there.
    """

    def check(profile: Profile, network: Network, ahead: bool) -> None:
        plan = policy.plan(profile, network)
        if why_not(plan, "all-reduce") is not None:
            _check_not_carried(policy, profile, Place(network))
            return
        with _promise(policy, "ranks can issue its messages in one order that is fixed ahead"):
            fixed = make_plan(policy, profile, Place(network))
            check_plan(fixed, profile.specs)
            assert fixed.sequence is not None, "no order was fixed"
            tried = [each.plan(profile, network) for each in trials(policy) or (policy,)]
            plan = next((each for each in tried if each.messages == fixed.messages and each.lanes == fixed.lanes), plan)
            first = [message for message, is_second in fixed.starts if not is_second]
            assert sorted(first) == list(range(len(plan.messages))), f"the order is {fixed.sequence}"
            assert (fixed.fingerprint == plan.fingerprint) == (plan.sequence is not None), (
                "the fingerprint leaves the order out"
            )
        with _promise(policy, "all-reduce carries its plan out"), logged_dispatchers() as made:
            free, bound = simulate(plan, profile, network, 2), simulate(fixed, profile, network, 2)
            check_timeline(free, plan)
            check_timeline(bound, fixed)
            # where an order's next gradient is not ready, no message waits for room, so that nobody has to wake up
            is_same = bound.spans == free.spans or network.wakeup_ns > 0
            assert plan.sequence is not None or is_same, "its order fixed ahead is another one"
            assert iteration_ns(plan, profile, network) == free.iteration_ns()[-1], "an iteration takes another time"
            _check_bound(profile, network, free.iteration_ns()[-1])
            assert free.iteration_ns()[-1] >= profile.compute_ns, "an iteration takes less than its computing"
            check_logs(made[:1], plan, dispatchers=1, iterations=2)
            check_logs(made[1:2], fixed, dispatchers=1, iterations=2)

    holds_for(examples, check, profile=profiles(), network=networks(), ahead=st.booleans())


def check_heterogeneous(policy: Policy, examples: int = 50) -> None:
    """Raise `AssertionError` unless all-reduce carries the plans out among workers that differ, on
    a network that changes.
    """

    def check(profile: Profile, percent: list[int], seed: int) -> None:
        network = Network.line(len(percent), 20_000, 10**9)
        if why_not(policy.plan(profile, network), "all-reduce") is not None:
            _check_not_carried(policy, profile, Place(network))
            return
        with _promise(policy, "all-reduce carries its plan out among workers that differ"), logged_dispatchers() as made:
            plan = make_plan(policy, profile, Place(network))
            made.clear()  # that of fixing the order
            timelines = simulate_heterogeneous(
                plan, profile, network, compute_percent=percent, steps=_RATES, jitter=0.3, seed=seed
            )
            for timeline in timelines:
                check_timeline(timeline, plan)
            check_logs(made, plan, dispatchers=len(percent), iterations=3)

    percents = st.lists(st.integers(50, 300), min_size=1, max_size=3)
    holds_for(_fewer(examples, 4), check, profile=_SMALL, percent=percents, seed=st.integers(0, 9))


def check_servers(policy: Policy, examples: int = 50) -> None:
    """Raise `AssertionError` unless servers in the processes of workers that are all alike carry
    the plans out.
    """

    def check(profile: Profile, workers: int, startup_ns: int) -> None:
        cluster = Cluster.homogeneous(workers, workers, 10**9, colocated=True, startup_ns=startup_ns)
        place = Place.of(cluster)
        if why_not(policy.plan(profile, place.network), "server") is not None:
            _check_not_carried(policy, profile, place)
            return
        with _promise(policy, "servers beside the workers carry its plan out"), logged_dispatchers() as made:
            plan = make_plan(policy, profile, place)
            made.clear()  # those of what it tried
            timelines = simulate_servers(plan, profile, cluster)
            assert len(timelines) == (workers if plan.is_acknowledged else 1), "one worker does not stand for all"
            for timeline in timelines:
                check_timeline(timeline, plan)
            _check_bound(profile, cluster, max(timeline.iteration_ns()[-1] for timeline in timelines))
            check_logs(made, plan, dispatchers=len(timelines), iterations=3)

    startups = st.sampled_from([0, 30_000])
    holds_for(_fewer(examples, 4), check, profile=_SMALL, workers=st.integers(1, 4), startup_ns=startups)


def check_any_servers(policy: Policy, examples: int = 50) -> None:
    """Raise `AssertionError` unless servers of any kind carry the plans out among workers that
    differ: synchronous, with bounded staleness and asynchronous; or they are refused there.
    """

    def check(profile: Profile, cluster: Cluster, staleness: int | None, jitter: float) -> None:
        place = Place.of(cluster)
        if why_not(policy.plan(profile, place.network), "server", place.has_external_servers) is not None:
            _check_not_carried(policy, profile, place)
            return
        with _promise(policy, "servers of any kind carry its plan out"), logged_dispatchers() as made:
            plan = make_plan(policy, profile, place)
            made.clear()  # those of what it tried
            timelines = simulate_servers(plan, profile, cluster, 2, staleness=staleness, jitter=jitter)
            for timeline in timelines:
                check_timeline(timeline, plan)
                assert len(timeline.iteration_ns()) == 2, f"{len(timeline.iteration_ns())} of 2 iterations were run"
            check_logs(made, plan, dispatchers=len(timelines), iterations=2)
            if staleness == 0 and jitter == 0:
                _check_bound(profile, cluster, simulate_steady(plan, profile, cluster).iteration_ns)

    holds_for(
        _fewer(examples, 2),
        check,
        profile=_SMALL,
        cluster=st.one_of(clusters(external=False), clusters()),
        staleness=st.sampled_from([0, 1, None]),
        jitter=st.sampled_from([0.0, 0.2]),
    )


CHECKS: tuple[Callable[[Policy, int], None], ...] = (
    check_description,
    check_plans,
    check_processes,
    check_knobs,
    check_all_reduce,
    check_heterogeneous,
    check_servers,
    check_any_servers,
)
"""The parts of `check_policy`, in its order; each takes the policy and the number of examples."""


def _fewer(examples: int, by: int) -> int:
    return max(1, examples // by)


def _title(policy: object) -> str:
    return f"policy {getattr(policy, 'name', type(policy).__name__)}"


@contextmanager
def _promise(policy: Policy, promise: str) -> Iterator[None]:
    """Whatever goes wrong meanwhile is an `AssertionError` with the policy and the promise."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{_title(policy)}: {promise}, but {error}") from error
    except Exception as error:
        raise AssertionError(f"{_title(policy)}: {promise}, but {type(error).__name__}: {error}") from error


def _anew(policy: Policy) -> Policy:
    """The policy made again from its knobs, with no memory of what the other has planned."""
    if not isinstance(policy, msgspec.Struct):
        return policy
    made: Policy = type(policy)(**msgspec.structs.asdict(policy))
    return made


def _first_difference(plan: Plan, other: Plan) -> str:
    for field in plan.__struct_fields__:
        if getattr(plan, field) != getattr(other, field):
            return f"its {field} differ: {getattr(plan, field)} and {getattr(other, field)}"
    return "nothing in it differs"


def _check_bound(profile: Profile, where: Network | Cluster, took_ns: int) -> None:
    least_ns = lower_bound_ns(profile, where)
    assert took_ns >= least_ns, f"an iteration takes {took_ns} ns, less than the lower bound of {least_ns} ns"


def _check_not_carried(policy: Policy, profile: Profile, place: Place) -> None:
    try:
        make_plan(policy, profile, place)
    except PlanError:
        return
    raise AssertionError(f"{_title(policy)}: its plan cannot be carried out by {place.backend}, and is not refused there")
