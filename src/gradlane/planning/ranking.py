"""Ranking: simulates all policies, and several sizes of each, for one job.

    python -m gradlane.planning.ranking < question.json > answer.json

answers a `Question` in a process of its own; a thread would take the interpreter from the training
loop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from gradlane import policies
from gradlane.core.backends import BackendName
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy, tunable
from gradlane.core.profile import Profile
from gradlane.core.records.search_log import Choice, Predicted
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.measured import where
from gradlane.planning.plans import make_plan
from gradlane.planning.search.space import MOST_PIECES, Space
from gradlane.sim import iteration_ns, simulate_servers

SAFE = Choice("ddp")
"""DDP's own buckets: the only plan that is sure to be no slower than DDP."""
_FIRST = ("blocks", "mercury", "mg-wfbp", "bytescheduler", "prophet", "tictac")
_NAMES_LAST = ("searched",)
_SEARCH_MOVES = 1500  # for `searched` as one candidate among many: about a second
_SIZES = 4  # of each knob
# Processor time that a message takes from computing, which the simulator leaves out: at least this
# many ns, and this fraction of the startup, which is mostly the processor's. It decides between
# plans with nearly equal predictions.
_OVERHEAD_NS, _OVERHEAD_PART = 20_000, 0.25
_NEAR = 1.25  # plans predicted to take this many times the best prediction are not tried


class Question(msgspec.Struct, frozen=True):
    """What to rank.

    Attributes:
        profile, network, backend: the job and its fitted network.
        servers: servers in processes of their own.
        look: number of the search round.
        most: how many plans to return.
        budget_ns: time to spend on predictions.
        crosses: whether the next forward pass can begin before all sums have come. It cannot if
            each step waits for them.
    """

    profile: Profile
    network: Network
    backend: BackendName
    servers: int
    look: int
    most: int
    budget_ns: int
    crosses: bool = True

    @property
    def place(self) -> Place:
        return Place(self.network, self.backend, self.servers)


class Ranked(msgspec.Struct, frozen=True):
    """A candidate to try, with its plan and the order of its messages."""

    predicted: Predicted
    plan: Plan

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


def rank(question: Question, now_ns: Callable[[], int] = time.monotonic_ns) -> Answer:
    """Predict candidates until the time is spent, but at least three.

    Plans that do the same count once.
    """
    profile, place = question.profile, question.place
    deadline_ns = now_ns() + question.budget_ns
    found: dict[str, Ranked] = {}
    for choice in candidates(profile, question.backend, place.has_external_servers):
        if len(found) >= 3 and now_ns() > deadline_ns:
            break
        plan = make_plan(policy_of(choice), profile, place)
        if len(plan.messages) > 2 * MOST_PIECES:
            continue  # no network makes up for the overhead of so many messages
        if any(lane.network_priority for lane in plan.lanes):
            continue  # unknown whether this network serves priority classes (`gradlane probe --priority` tells)
        alike = likeness(plan)
        if alike not in found:
            carried = plan if question.crosses else msgspec.structs.replace(plan, crosses_barrier=False)
            took_ns = simulated_ns(carried, profile, place)
            found[alike] = Ranked(Predicted(msgspec.structs.replace(choice, look=question.look), took_ns), plan)
    overhead_ns = max(_OVERHEAD_NS, _OVERHEAD_PART * place.network.startup_ns)
    ranked = sorted(found.values(), key=lambda each: each.predicted.iteration_ns + overhead_ns * len(each.plan.messages))
    default = policies.default(question.backend)
    return Answer(tuple(each.predicted for each in ranked), tuple(_worth_trying(ranked, question.most, default)))


def likeness(plan: Plan) -> str:
    """A key that is equal for plans that do the same under different names."""
    return msgspec.structs.replace(plan, policy="any").fingerprint


def simulated_ns(plan: Plan, profile: Profile, place: Place) -> int:
    """The steady-state iteration time in ns at a place whose network was measured there."""
    simulated = where(place)
    if isinstance(simulated, Network):
        return iteration_ns(plan, profile, simulated)
    return max(timeline.iteration_ns()[-1] for timeline in simulate_servers(plan, profile, simulated, iterations=2))


def _worth_trying(ranked: list[Ranked], most: int, default: str) -> list[Ranked]:
    """The best candidate of each of the best policies, then other sizes, then cut to `most`.

    An error of the simulator for one size holds for the next size of that policy too, so policies
    come first. The backend's default policy is always among them.
    """
    near = [each for each in ranked if each.predicted.iteration_ns <= ranked[0].predicted.iteration_ns * _NEAR]
    of_policy: dict[str, Ranked] = {}
    for each in near:
        of_policy.setdefault(each.choice.policy, each)
    own = [each for each in ranked if each.choice.policy == default and not each.choice.knobs]
    order = [*list(of_policy.values())[: max(1, most - 1)], *own, *near]
    chosen: list[Ranked] = []
    for each in order:
        if each not in chosen and not (each.choice.policy == SAFE.policy and not each.choice.knobs):
            chosen.append(each)
    return chosen[:most]


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(rank(question)))


if __name__ == "__main__":
    main()
