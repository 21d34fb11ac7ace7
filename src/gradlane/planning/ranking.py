"""Ranking: simulates all policies, and several sizes of each, for one job, over each of its backends.

    python -m gradlane.planning.ranking < question.json > answer.json

answers a `Question` in a process of its own; a thread would take the interpreter from the training
loop.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import UNSET

from gradlane import lifetime, policies
from gradlane.core.backends import BackendName
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy, tunable
from gradlane.core.profile import Profile
from gradlane.core.records.search_log import Choice, Predicted
from gradlane.errors import InputError, PlanError
from gradlane.planning import catalog
from gradlane.planning.measured import where
from gradlane.planning.plans import make_plan, took_ns, when_clipping
from gradlane.planning.search.space import MOST_PIECES, Space
from gradlane.policies.owners import Owners
from gradlane.sim import few_packets

SAFE = Choice("ddp")
"""DDP's own buckets: over all-reduce the only plan that is sure to be no slower than DDP."""
_FIRST = ("owners", "blocks", "mercury", "mg-wfbp", "bytescheduler", "prophet", "tictac")
_NAMES_LAST = ("searched",)
_SEARCH_MOVES = 1500  # for `searched` as one candidate among many: about a second
_SIZES = 4  # of each knob
# Processor time that a message takes from computing: at least this many ns, and this fraction of
# the startup, which is mostly the processor's. The simulator has only what the network's `start_ns`
# says. The rest decides between plans with nearly equal predictions.
_OVERHEAD_NS, _OVERHEAD_PART = 20_000, 0.25
_NEAR = 1.25  # plans predicted to take this many times the best prediction are not tried
# of one policy and size over two backends only the faster one is tried, if the other is predicted
# to take this many times as long
_APART = 1.05


class Question(msgspec.Struct, frozen=True):
    """What to rank.

    Attributes:
        profile: the job.
        places: its fitted network, with what carries messages there; one place for each backend
            that may be chosen.
        look: number of the search round.
        most: how many plans to return.
        budget_ns: time to spend on predictions.
        crosses: whether the next forward pass can begin before all sums have come. It cannot if
            each step waits for them.
        clips: where it cannot, the order of the norms that are all that each step waits for; None if there is more.
    """

    profile: Profile
    places: tuple[Place, ...]
    look: int
    most: int
    budget_ns: int
    crosses: bool = True
    clips: float | None = None


class Ranked(msgspec.Struct, frozen=True):
    """A candidate to try, with its plan and the order of its messages.

    Attributes:
        predicted: the choice and its predicted iteration time.
        plan: of the choice.
        expected_ns: the prediction, and the processor time of the messages.
    """

    predicted: Predicted
    plan: Plan
    expected_ns: float

    @property
    def choice(self) -> Choice:
        return self.predicted.choice


class Answer(msgspec.Struct, frozen=True):
    """The result of a ranking.

    Attributes:
        predicted: all candidates that there was time for, the fastest first.
        worth_trying: some of them, in the order to try them in.
    """

    predicted: tuple[Predicted, ...]
    worth_trying: tuple[Ranked, ...]


def policy_of(choice: Choice) -> Policy:
    """The policy of a choice, with its knobs set.

    Raises:
        InputError: the policy does not exist.
    """
    return catalog.get(choice.policy, **choice.knobs)


def safe_choice(places: Sequence[Place]) -> Choice:
    """The safe choice; it runs at places[0]."""
    return msgspec.structs.replace(SAFE, backend=_named(places[0], places))


def _named(place: Place, places: Sequence[Place]) -> BackendName | None:
    return place.backend if len(places) > 1 else None


def often_good(backend: BackendName, external: bool = False) -> tuple[Choice, ...]:
    """The safe choice, and others to predict first in case time runs out."""
    carried = catalog.names(backend, external)
    return (SAFE, *(Choice(name) for name in _FIRST if name in carried))


def candidates(profile: Profile, backend: BackendName, external: bool = False) -> Iterator[Choice]:
    """All that `backend` carries: first `often_good`, then every policy, then sizes of each."""
    names = catalog.names(backend, external)
    first = often_good(backend, external)
    others = [Choice(name) for name in names if Choice(name) not in first and name not in _NAMES_LAST]
    yield from first
    yield from others
    for step in range(_SIZES):
        for name in (each.policy for each in (*first, *others)):
            policy = catalog.get(name)
            if tunable(policy):
                space = Space.of(policy, profile.specs)
                knobs = space.knobs(((step + 0.5) / _SIZES,) * space.dimensions)
                try:
                    policy_of(Choice(name, knobs))
                except InputError:  # the value contradicts a knob that is not searched
                    continue
                yield Choice(name, knobs)
    if "searched" in names:
        yield Choice("searched", {"moves": _SEARCH_MOVES})


def candidates_at(profile: Profile, places: Sequence[Place], clips: float | None) -> Iterator[tuple[Place, Choice]]:
    """The `candidates` of all places in turns, so that each has its share of the time.

    Plans with owners are among them where a script reads norms (`clips`, as in `Question`): they would be told to nobody
    else.
    """
    of_each = [candidates(profile, place.backend, place.has_external_servers) for place in places]
    order = _order_of(clips)
    for choices in itertools.zip_longest(*of_each):
        for place, choice in zip(places, choices, strict=True):
            if choice is None:
                continue
            if choice.policy == Owners.name:
                if order is None or place.network.bus is not UNSET:
                    continue
                if order != Owners().order:
                    choice = msgspec.structs.replace(choice, knobs={**choice.knobs, "order": order})
            yield place, msgspec.structs.replace(choice, backend=_named(place, places))


def rank(question: Question, now_ns: Callable[[], int] = time.monotonic_ns) -> Answer:
    """Predict candidates until the time is spent, but at least three for each place.

    Plans that do the same count once. The best of them are predicted once more, as exactly as possible, within the
    rest of the time and a quarter more. They rank before the others.
    """
    profile, places = question.profile, question.places
    deadline_ns = now_ns() + question.budget_ns
    found: dict[str, tuple[Ranked, Place]] = {}
    for place, choice in candidates_at(profile, places, question.clips):
        if len(found) >= 3 * len(places) and now_ns() > deadline_ns:
            break
        try:
            plan = make_plan(policy_of(choice), profile, place)
        except PlanError:
            raise
        except InputError:  # its knobs do not go with a model of this size
            continue
        if len(places) > 1:
            plan = msgspec.structs.replace(plan, backend=place.backend)
        if len(plan.messages) > 2 * MOST_PIECES:
            continue  # no network makes up for the overhead of so many messages
        if any(lane.network_priority for lane in plan.lanes):
            continue  # unknown whether this network serves priority classes (`gradlane probe --priority` tells)
        alike = likeness(plan)
        if alike not in found:
            choice = msgspec.structs.replace(choice, look=question.look)
            found[alike] = _predicted(choice, plan, place, question), place
    by_expected = sorted(found.values(), key=lambda each: each[0].expected_ns)
    has_few = {place.backend: few_packets(profile, where(place)) for place in places}
    exact: list[Ranked] = []
    for each, place in by_expected[: 2 * question.most]:
        if now_ns() > deadline_ns + question.budget_ns // 4:
            break
        again = has_few[place.backend]
        exact.append(_predicted(each.choice, each.plan, place, question, whole=True) if again else each)
    ranked = sorted(exact, key=lambda each: each.expected_ns) + [each for each, _ in by_expected[len(exact) :]]
    return Answer(tuple(each.predicted for each in ranked), tuple(_worth_trying(ranked, question)))


def _predicted(choice: Choice, plan: Plan, place: Place, question: Question, *, whole: bool = False) -> Ranked:
    carried = plan if question.crosses else when_clipping(plan, question.clips)
    took_ns = simulated_ns(carried, question.profile, place, whole=whole)
    return Ranked(Predicted(choice, took_ns), plan, with_overhead(took_ns, plan, place.network))


def with_overhead(took_ns: int, plan: Plan, network: Network) -> int:
    """An iteration of `took_ns` with what the messages of its plan take from computing, by which plans are compared."""
    overhead_ns = max(0, max(_OVERHEAD_NS, _OVERHEAD_PART * network.startup_ns) - network.start_ns)
    return took_ns + round(overhead_ns * len(plan.messages))


def _order_of(clips: float | None) -> int | None:
    """The order of norms as plans have it; None if no plan tells them."""
    if clips == math.inf:
        return 0
    return None if clips is None or not clips.is_integer() or not 0 < clips <= 64 else int(clips)


def likeness(plan: Plan) -> str:
    """A key that is equal for plans that do the same under different names."""
    return msgspec.structs.replace(plan, policy="any").fingerprint


def simulated_ns(plan: Plan, profile: Profile, place: Place, *, whole: bool = False) -> int:
    """The steady-state iteration time in ns at a place whose network was measured there.

    Args:
        plan, profile, place: what to simulate.
        whole: as for `sim.simulate_servers`.
    """
    return took_ns(plan, profile, where(place), whole=whole)


def _worth_trying(ranked: list[Ranked], question: Question) -> list[Ranked]:
    """The best candidate over each backend, of each of the best policies, the backends' default
    policies, then other sizes, cut to `question.most`.

    An error of the simulator for one size holds for the next size of that policy too, so policies
    come first. The default policy of the backend with the best prediction is always among them. That of another
    backend is, if some plan over it is predicted to be nearly as fast.
    """
    safe = safe_choice(question.places)
    twins: dict[str, float] = {}  # by policy and knobs: what is expected over the best backend
    for each in ranked:
        twins.setdefault(_apart_from_backend(each.choice), each.expected_ns)
    near = [
        each for each in ranked
        if each.predicted.iteration_ns <= ranked[0].predicted.iteration_ns * _NEAR
        and each.expected_ns <= twins[_apart_from_backend(each.choice)] * _APART
    ]  # fmt: skip
    over_backend: dict[BackendName | None, Ranked] = {}
    of_policy: dict[str, Ranked] = {}
    for each in near:
        over_backend.setdefault(each.choice.backend, each)
        of_policy.setdefault(each.choice.policy, each)
    defaults = [
        Choice(policies.default(backend or question.places[0].backend), look=question.look, backend=backend)
        for backend in over_backend
    ]
    own = [each for default in defaults for each in ranked if each.choice == default]
    best = list(dict.fromkeys(each.choice for each in (*over_backend.values(), *of_policy.values())))
    order = [*best[: max(1, question.most - len(own))], *(each.choice for each in (*own, *near))]
    left = [choice for choice in dict.fromkeys(order) if msgspec.structs.replace(choice, look=0) != safe]
    by_choice = {each.choice: each for each in ranked}
    return [by_choice[choice] for choice in left[: question.most]]


def _apart_from_backend(choice: Choice) -> str:
    return str(msgspec.structs.replace(choice, backend=None))


def main() -> None:
    lifetime.end_with_starter()
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(rank(question)))


if __name__ == "__main__":
    main()
