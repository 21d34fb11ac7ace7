"""Sweep: simulates every policy on every case to the steady state, with the lower bounds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from gradlane.core.backends import why_not
from gradlane.core.checks import check_timeline
from gradlane.core.cluster import Cluster
from gradlane.core.fields import MAX_NS, need
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy, trials
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.errors import InputError, PlanError
from gradlane.planning import catalog
from gradlane.planning.plans import accepted, make_plan, when_clipping
from gradlane.planning.searched import Progress, Searched
from gradlane.policies.owners import Owners
from gradlane.sim import iteration_ns, simulate, simulate_steady, steady_iteration
from gradlane.sim.bounds import lower_bound_ns, oracle_ns
from gradlane.sim.fabric import FOREVER
from gradlane.units import format_ns

Where = Network | Cluster
_LONGEST_NS = MAX_NS // 1000  # of a step; its timeline must not exceed `MAX_NS`


@dataclass(frozen=True)
class Case:
    """A profile, and the network or cluster that it runs on.

    Attributes:
        profile: the profile.
        where: an all-reduce network, or a cluster with parameter servers.
        labels: what distinguishes the case in a table, as in {"bits_per_second": 10**10, "workers":
            8}.
        whole: simulate every worker and packet of a cluster, though the workers are all alike.
        alone: the profile of a device that waits for no other, where `profile` waits for slower ones (`jitter`); None: the
            same.
        clips: the order of the norms of gradients that each step reads; None: it reads none.
    """

    profile: Profile
    where: Where
    labels: dict[str, str | int] = field(default_factory=dict)
    whole: bool = False
    alone: Profile | None = None
    clips: float | None = None

    @property
    def of_one(self) -> Profile:
        """The profile of a device that waits for no other."""
        return self.profile if self.alone is None else self.alone

    @property
    def workers(self) -> int:
        return self.where.workers if isinstance(self.where, Network) else len(self.where.workers)

    @property
    def is_alone(self) -> bool:
        """Whether there is one worker, which sends nothing."""
        return self.workers == 1 and isinstance(self.where, Network)

    @property
    def bound_ns(self) -> int:
        """The lower bound of an iteration's time."""
        return oracle_ns(self.profile) if self.is_alone else lower_bound_ns(self.profile, self.where)

    @property
    def place(self) -> Place:
        """The place that plans are made for."""
        return Place.of(self.where)

    @property
    def policies(self) -> tuple[str, ...]:
        """The names of all policies that can run here but `searched`; `owners` if norms are read."""
        others = {Searched.name} if self.clips is not None else {Searched.name, Owners.name}
        return tuple(name for name in catalog.carried_at(self.place) if name not in others)


@dataclass(frozen=True)
class Outcome:
    """A policy on a case.

    Attributes:
        case, plan: what was simulated.
        iteration_ns: steady-state iteration time; of the slowest worker if workers differ.
    """

    case: Case
    plan: Plan
    iteration_ns: int
    bound_ns: int
    """The lower bound of the iteration time (`sim.bounds.lower_bound_ns`)."""
    steady: range = range(2, 3)
    """The iterations of the timeline that `iteration_ns` is the mean of."""
    seen: Timeline | None = field(default=None, compare=False, repr=False)
    """The simulation's timeline, if the judgement made one."""
    seen_hidden: float | None = field(default=None, compare=False, repr=False)
    """What was hidden, if the judgement made no timeline."""
    setting: str = ""
    """The policy with its knobs (`catalog.spelled`), where it is known; a plan has its name alone."""

    @property
    def policy(self) -> str:
        """What tells it from other outcomes on the case."""
        return self.setting or self.plan.policy

    @property
    def oracle_ns(self) -> int:
        """Computation alone, in ns, of a device that waits for no other."""
        return oracle_ns(self.case.of_one)

    @property
    def efficiency(self) -> float:
        """The fraction of linear scaling, 0 to 1."""
        return self.oracle_ns / self.iteration_ns if self.iteration_ns else 1.0

    @property
    def possible(self) -> float:
        """The fraction of linear scaling that no schedule exceeds, 0 to 1."""
        return self.oracle_ns / self.bound_ns if self.bound_ns else 1.0

    @property
    def above_bound(self) -> float:
        """How far above the lower bound, as a fraction of it; 0 is proven best."""
        return self.iteration_ns / self.bound_ns - 1 if self.bound_ns else 0.0

    def hidden(self) -> float:
        """The fraction of communication that is overlapped with computation (`Timeline.hidden`)."""
        return self.timeline().hidden() if self.seen_hidden is None else self.seen_hidden

    def timeline(self) -> Timeline:
        """The checked timeline; of the slowest worker on a cluster."""
        timeline = self.seen
        if timeline is None:
            assert isinstance(self.case.where, Network)
            timeline = simulate(self.plan, self.case.profile, self.case.where)
        check_timeline(timeline, self.plan)
        return timeline


@dataclass(frozen=True)
class Refusal:
    """A policy that cannot plan a case, and why.

    Attributes:
        case: the case.
        policy: the policy with its knobs (`catalog.spelled`).
        error: what it, or the place, raised.
    """

    case: Case
    policy: str
    error: InputError


def judge(policy: Policy, case: Case, bound_ns: int | None = None, progress: Progress | None = None) -> Outcome:
    """Plan `case` with `policy` and simulate the plan.

    Args:
        policy, case: what to plan and simulate.
        bound_ns: the lower bound, if the caller has it already.
        progress: of a policy that searches.

    Raises:
        PlanError: nothing can carry the plan there.
    """
    if bound_ns is None:
        bound_ns = case.bound_ns
    need(
        bound_ns < _LONGEST_NS, "step", format_ns(bound_ns), f"less than {format_ns(_LONGEST_NS)}: faster links, or fewer bytes"
    )
    return replace(_simulated(_plan(policy, case, progress), case, bound_ns), setting=catalog.spelled(policy))


def _plan(policy: Policy, case: Case, progress: Progress | None) -> Plan:
    if isinstance(policy, Searched):
        return _search(policy, case, progress)
    if not catalog.is_users(policy):
        return make_plan(policy, case.profile, case.place, case.where)
    with contextlib.redirect_stdout(sys.stderr):  # what it prints is no answer of gradlane's
        plan = make_plan(policy, case.profile, case.place, case.where)
        if not trials(policy) and make_plan(policy, case.profile, case.place) != plan:
            raise PlanError(
                f"policy {policy.name}: plan() gave two plans for one profile and network, expected the same each time: no "
                "random numbers without a seed, no clock and no memory of its own"
            )
    return plan


def _search(policy: Searched, case: Case, progress: Progress | None) -> Plan:
    """Search the best plan for `case`, whose simulation judges the plans that the search ends with."""
    place, where = case.place, case.where

    def took_ns(plan: Plan) -> int:
        if isinstance(where, Network):
            return iteration_ns(plan, case.profile, where)
        if why_not(plan, place.backend, place.has_external_servers) is not None:
            return FOREVER
        return simulate_steady(plan, case.profile, where, whole=case.whole).iteration_ns

    return accepted(policy.search(case.profile, place.network, progress, took_ns).plan, case.profile, place)


def judge_plan(plan: Plan, case: Case, bound_ns: int | None = None) -> Outcome:
    """Simulate a given plan for `case`; otherwise as `judge`."""
    return _simulated(accepted(plan, case.profile, case.place), case, bound_ns)


def _simulated(plan: Plan, case: Case, bound_ns: int | None) -> Outcome:
    if bound_ns is None:
        bound_ns = case.bound_ns
    if case.clips is not None:
        plan = when_clipping(plan, case.clips)
    if case.is_alone:
        return Outcome(case, plan, bound_ns, bound_ns, seen_hidden=0.0)
    if isinstance(case.where, Network):
        steady = steady_iteration(plan, case.profile, case.where)
        return Outcome(case, plan, steady.iteration_ns, bound_ns, seen_hidden=steady.hidden)
    found = simulate_steady(plan, case.profile, case.where, whole=case.whole)
    return Outcome(case, plan, found.iteration_ns, bound_ns, found.iterations, found.timeline)


def sweep(
    cases: Sequence[Case],
    policies: Iterable[str | Policy] | None = None,
    advance: Callable[[int], None] = lambda done: None,
    refuse: Callable[[Refusal], None] | None = None,
) -> list[Outcome]:
    """Judge every policy on every case.

    Args:
        cases: the cases, the outer loop.
        policies: themselves, or their names; None: all that can run on the case, but `searched`.
        advance: called with 1 after each outcome or refusal.
        refuse: called with each policy that cannot plan a case; the others go on. None: raise.

    Raises:
        InputError: a policy does not exist, or none can plan any case.
        PlanError: a policy cannot run on a case, and nobody asked for refusals.
    """
    named = None if policies is None else tuple(policies)
    refused: InputError | None = None
    outcomes = []
    for case in cases:
        bound_ns = case.bound_ns
        for asked in case.policies if named is None else named:
            policy = catalog.get(asked) if isinstance(asked, str) else asked
            try:
                outcomes.append(judge(policy, case, bound_ns))
            except InputError as error:
                if refuse is None:
                    raise
                refused = refused or error
                refuse(Refusal(case, catalog.spelled(policy), error))
            advance(1)
    if refused is not None and not outcomes:
        raise refused
    return outcomes
