"""searched: the best plan found for a profile and a network, with its distance to the lower bound."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

import msgspec

from gradlane import policies
from gradlane.core.fields import need_int
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.planning.batching import best_batches
from gradlane.planning.plans import make_plan
from gradlane.planning.schedule_problem import Group, Schedule, ScheduleProblem
from gradlane.sim import iteration_ns
from gradlane.sim.bounds import lower_bound_ns

Progress = Callable[[float, int], None]
"""Called now and then with the fraction of the search that is done and the best iteration time so
far, in ns.
"""

MERGED_ANEW = 4  # starting schedules whose best merges are computed exactly
QUIET = 300  # moves without a better plan before the search goes elsewhere


class Found(NamedTuple):
    """A plan, its simulated iteration time and the lower bound, in ns."""

    plan: Plan
    iteration_ns: int
    bound_ns: int

    @property
    def distance(self) -> float:
        """How far above the bound the plan is, as a fraction of the bound; 0 is proven best."""
        return self.iteration_ns / self.bound_ns - 1 if self.bound_ns else 0.0


class Searched(msgspec.Struct, frozen=True):
    """Search merges, slices and order together, with startup and the forward pass (open in MG-WFBP
    §8).

    A plan is an order of messages, each sent alone when it is ready and the one before has arrived.
    The iteration time is the maximum over messages of arrival + what the forward pass still has to run from the
    message's first layer on. That is a single machine with release times, delivery times and a setup for each batch.

    The search starts from the orders of all other policies and finds the best merges of the best
    ones by dynamic programming. Then it tries `moves` changes (merge, split, move, cut) where the
    iteration time is determined. It ends early at the lower bound. That formula judges each change. The simulator
    judges the result, sent one message at a time or as soon as messages are ready, beside the plans that it started
    from. So it is no worse than these, on networks with several messages in flight too, and where hosts have several
    devices. Lanes that preempt one another and two-phase messages are not searched.

    Differs from the paper: there is none.

    Attributes:
        moves: number of changes to try.
        seed: the same seed gives the same plan.
    """

    name: ClassVar[str] = "searched"
    paper: ClassVar[str] = "none: gradlane's answer to what MG-WFBP (TPDS '21) §8 leaves open"
    differs: ClassVar[str] = "-"
    plans_with_bus: ClassVar[bool] = True

    moves: int = 60_000
    seed: int = 0

    def __post_init__(self) -> None:
        need_int("moves", self.moves, 0, 10**9)
        need_int("seed", self.seed, 0, 2**62)

    def plan(self, profile: Profile, network: Network) -> Plan:
        return self.search(profile, network).plan

    def search(
        self,
        profile: Profile,
        network: Network,
        progress: Progress | None = None,
        simulated_ns: Callable[[Plan], int] | None = None,
    ) -> Found:
        """Search for the best plan; the same for the same seed.

        Args:
            profile, network: what to plan for. With a bus, messages one after another cost `Network.path`.
            progress: called now and then.
            simulated_ns: judges whole plans, in ns an iteration; None: `sim.iteration_ns` on `network`. A cluster that
                the network stands for is simulated otherwise.

        Returns:
            The plan, its simulated iteration time and the lower bound.
        """
        # what starting messages takes from computing moves with the messages: it is counted in the end
        free = msgspec.structs.replace(network, start_ns=0, wakeup_ns=0)
        bound_ns = lower_bound_ns(profile, free)
        one_by_one = _one_by_one(network)
        best_ns = bound_ns if one_by_one == free else lower_bound_ns(profile, one_by_one)
        problem = ScheduleProblem(profile, one_by_one)
        others = starting_plans(profile, free)
        judged_ns = simulated_ns or functools.partial(iteration_ns, profile=profile, network=network)
        starts = sorted(_distinct(problem.schedule_of(plan) for plan in others), key=lambda order: order.value)
        best = starts[0]
        for order in starts[:MERGED_ANEW]:
            if best.value > best_ns:
                best = min(best, best_batches(problem, order, best_ns), key=lambda order: order.value)
        best = self._climb(best, best_ns, progress)
        plan = _as_plan(self.name, best.groups, profile)
        assert iteration_ns(plan, profile, one_by_one) == best.value, "the search and the simulator disagree"
        found = Found(plan, judged_ns(plan), bound_ns)
        # fewer messages may be better, or several in flight, with this order or another; not every
        # server carries two-phase messages, and not every network serves one lane before another
        given = others if network == free else starting_plans(profile, network)
        whole = [each for each in given if not each.second_phases and not any(lane.network_priority for lane in each.lanes)]
        at_once = [msgspec.structs.replace(each, policy=self.name, crosses_barrier=True) for each in whole]
        for other in (msgspec.structs.replace(plan, lanes=(Lane(),)), *at_once):
            other_ns = judged_ns(other)
            if other_ns < found.iteration_ns:
                found = Found(other, other_ns, bound_ns)
        if progress is not None:
            progress(1.0, found.iteration_ns)
        return found

    def _climb(self, best: Schedule, bound_ns: int, progress: Progress | None) -> Schedule:
        draw = random.Random(self.seed)
        current, quiet = best, 0
        for move in range(self.moves):
            if best.value <= bound_ns:
                break
            if progress is not None and move % 500 == 0:
                progress(move / self.moves, best.value)
            if quiet == QUIET:
                # no neighbour is better: take some steps away, to values not much worse, and climb
                # from there
                current, quiet = best, 0
                far = draw.choice((1, 3, 10))
                for _ in range(draw.randint(1, 6)):
                    aside = current.changed(draw)
                    if aside is not None and aside.value <= best.value + (best.value - bound_ns) // far:
                        current = aside
            changed = current.changed(draw)
            quiet += 1
            if changed is not None and changed.value <= current.value:
                current = changed
                if current.value < best.value:
                    best, quiet = current, 0
        return best


def _one_by_one(network: Network) -> Network:
    """What messages cost where each waits for the one before it, and starting them takes nothing from computing: every
    message takes `wakeup_ns` longer.
    """
    wakeup_ns, path = network.between.wakeup_ns, network.path
    segments = tuple(msgspec.structs.replace(segment, startup_ns=segment.startup_ns + wakeup_ns) for segment in path.segments)
    least_ns = path.min_message_ns + wakeup_ns if path.min_message_ns else 0
    return msgspec.structs.replace(path, segments=segments, min_message_ns=least_ns, start_ns=0, wakeup_ns=0)


def starting_plans(profile: Profile, network: Network) -> list[Plan]:
    """The plans of the other policies over all-reduce, also with other sizes, with their orders; none with owners."""
    kinds: list[Policy] = [policies.get(name) for name in policies.names("all-reduce", with_bus=True)]
    for exponent in range(17, 26, 2):
        size = 2**exponent
        kinds.append(policies.get("bytescheduler", partition_bytes=size, credit_bytes=size))
        kinds.append(policies.get("blocks", least_bytes=size, most_bytes=size))
    kinds += [policies.get("prophet", partition_bytes=size) for size in (2**18, 2**20)]
    return [make_plan(kind, profile, Place(network)) for kind in kinds]


def _distinct(orders: Iterable[Schedule]) -> Iterable[Schedule]:
    return {tuple(group.pieces for group in order.groups): order for order in orders}.values()


def _as_plan(name: str, groups: list[Group], profile: Profile) -> Plan:
    urgency = profile.urgency()
    messages = tuple(Message(_joined(group.pieces), min(urgency[p.tensor] for p in group.pieces)) for group in groups)
    # a window of one byte allows one message at a time, since a lone larger one may always go
    lanes = (Lane(window_bytes=1),)
    plan = Plan(name, profile.model, profile.specs, messages, lanes, crosses_barrier=True)
    return plan.with_sequence(tuple(range(len(messages))))


def _joined(pieces: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """Join slices of a tensor that touch."""
    joined: list[Slice] = []
    for _, parts in itertools.groupby(sorted(pieces, key=lambda p: (p.tensor, p.offset_bytes)), key=lambda p: p.tensor):
        for part in parts:
            last = joined[-1] if joined else None
            if last and last.tensor == part.tensor and last.offset_bytes + last.size_bytes == part.offset_bytes:
                joined[-1] = Slice(part.tensor, last.offset_bytes, last.size_bytes + part.size_bytes)
            else:
                joined.append(part)
    return tuple(joined)
