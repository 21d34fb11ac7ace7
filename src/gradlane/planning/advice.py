"""Advice: what scheduling would bring to a script, from what was measured of it under DDP."""

from __future__ import annotations

from statistics import median

import msgspec
from msgspec import structs

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.ddp_run import DdpRun
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.plans import accepted, behind_barrier, make_plan, when_clipping
from gradlane.planning.questions import Case
from gradlane.planning.ranking import with_overhead
from gradlane.planning.search.space import MOST_PIECES
from gradlane.planning.stock_ddp import why_not_ddp
from gradlane.sim import iteration_ns
from gradlane.sim.bounds import lower_bound_ns

WORTH = 0.03
"""The part of a step that has to be saved before anything is recommended: less is lost in what steps differ by."""
DOUBTFUL = 0.1
"""The part by which the simulated step of DDP may differ from the measured one before the advice begins with that."""
SAME = 0.01
"""The part of a step by which simulated steps may differ and are called equal: less is within the simulator's error."""
BASELINE = "ddp"


class Option(msgspec.Struct, frozen=True):
    """One policy, simulated.

    Attributes:
        policy: its name; the baseline is DDP with the script's own buckets where they are known.
        iteration_ns: of a steady step, as `simulate` has it.
        expected_ns: the same with what its messages take from computing, which is what is shown and compared.
        saves: how much less than DDP's simulated step it takes, as a part of DDP's measured step; negative if it takes
            more. So all parts of an advice have one denominator. It is no more than the bound leaves of the measured step.
        messages: how many it sends.
        by_ddp: stock DDP can carry its plan out.
        plan: the plan.
    """

    policy: str
    iteration_ns: int
    expected_ns: int
    saves: float
    messages: int
    by_ddp: bool
    plan: Plan


class Advice(msgspec.Struct, frozen=True):
    """What scheduling would bring. All parts are of DDP's measured step, `step_ns`.

    Attributes:
        run: what was measured.
        profile: what was simulated: the run's profile, whose uncovered time makes it as long as a step of computing
            alone.
        step_ns, alone_ns: the median measured step, and that of computing alone.
        waits_ns: of the rank that waits least, how long a step waits for sums when its backward
            pass is over; None on a device.
        bound_ns, halved_bound_ns: simulated; no schedule's step takes less, with gradients as they are and in halves.
        options: the fastest first; DDP is among them.
    """

    run: DdpRun
    profile: Profile
    step_ns: int
    alone_ns: int
    waits_ns: int | None
    bound_ns: int
    halved_bound_ns: int
    options: tuple[Option, ...]

    @property
    def has_capped_savings(self) -> bool:
        """Whether an option would save more, as simulated, than the bound leaves of the measured step."""
        return any(
            option.saves == self.possible < (self.baseline.expected_ns - option.expected_ns) / self.step_ns
            for option in self.options
        )

    @property
    def costs(self) -> float:
        """The part of a step that summing adds: waits, and what it takes from computing."""
        return max(0.0, 1 - self.alone_ns / self.step_ns)

    @property
    def baseline(self) -> Option:
        """DDP as it is."""
        return next(option for option in self.options if option.policy == BASELINE)

    @property
    def best(self) -> Option:
        """The fastest; DDP where nothing is faster."""
        return self.options[0]

    @property
    def saves(self) -> float:
        """The part of a step that the best policy would save."""
        return max(0.0, self.best.saves)

    @property
    def possible(self) -> float:
        """The part of a step that some schedule might save at most: one that is as fast as the bound."""
        return _at_most(self.step_ns, self.bound_ns)

    @property
    def hidable(self) -> float:
        """By how much DDP's simulated step is above the bound, as a part of the measured step: what a schedule could hide."""
        return max(0.0, (self.baseline.expected_ns - self.bound_ns) / self.step_ns)

    @property
    def off(self) -> float:
        """By which part the simulated step of DDP differs from the measured one."""
        return self.baseline.expected_ns / self.step_ns - 1

    @property
    def is_doubtful(self) -> bool:
        """Whether the simulator is so far off DDP's measured step that what it says of others is rough."""
        return abs(self.off) > DOUBTFUL

    @property
    def is_refuted(self) -> bool:
        """Whether the measured step takes far less than the bound, as no step can: what was measured does not go together."""
        return self.bound_ns > (1 + DOUBTFUL) * self.step_ns

    @property
    def differs(self) -> bool:
        """Whether some policy's simulated step differs from DDP's by enough to show."""
        return any(abs(option.saves) >= SAME for option in self.options)

    @property
    def is_bound_by_network(self) -> bool:
        """Whether even the best schedule waits for the network."""
        return self.bound_ns > (1 + WORTH) * self.alone_ns

    @property
    def is_worth_it(self) -> bool:
        """Whether the best policy saves enough, and what was measured leaves as much to save."""
        return self.saves >= WORTH

    @property
    def best_by_ddp(self) -> Option | None:
        """The fastest option that stock DDP can carry out, if it is worth it."""
        found = next((option for option in self.options if option.by_ddp), None)
        return found if found is not None and found.policy != BASELINE and found.saves >= WORTH else None


def advise(run: DdpRun) -> Advice:
    """Simulate every policy for a script that was measured under DDP.

    Args:
        run: what was measured.

    Raises:
        InputError: there are fewer than two ranks, or no step.
    """
    if run.workers < 2:
        raise InputError("got one rank, expected two or more: a rank alone sums nothing")
    step_ns, alone_ns = round(median(run.step_ns)), round(median(run.alone_ns))
    profile = _covering(run.profile, alone_ns)
    case = Case(profile, run.network, clips=run.norm)
    bounds = [lower_bound_ns(each, run.network) for each in (profile, profile.with_wire_dtype("bfloat16"))]
    own = run.plan or make_plan(catalog.get(BASELINE), profile, case.place)
    baseline = _option(BASELINE, own, case, run)
    most = _at_most(step_ns, bounds[0])
    options = [baseline]
    for name in case.policies:
        if name == BASELINE:
            continue
        try:
            plan = make_plan(catalog.get(name), profile, case.place)
        except InputError:  # its knobs do not go with a model of this size
            continue
        # unknown whether this network serves priority classes; and overhead that no network makes up for
        if not any(lane.network_priority for lane in plan.lanes) and len(plan.messages) <= 2 * MOST_PIECES:
            option = _option(name, plan, case, run)
            saves = min((baseline.expected_ns - option.expected_ns) / step_ns, most)
            options.append(structs.replace(option, saves=saves))
    options.sort(key=lambda option: (option.expected_ns, option.policy != BASELINE))
    waits_ns = min(run.waits_ns) if run.waits_ns else None
    return Advice(run, profile, step_ns, alone_ns, waits_ns, bounds[0], bounds[1], tuple(options))


def _at_most(step_ns: int, bound_ns: int) -> float:
    """The part of a step that a schedule would save which is as fast as the bound."""
    return max(0.0, 1 - bound_ns / step_ns)


def _option(name: str, plan: Plan, case: Case, run: DdpRun) -> Option:
    """`plan`, simulated, as if it saved nothing."""
    assert isinstance(case.where, Network)
    if run.reads:
        plan = when_clipping(plan, run.norm)
    if run.reads_parameters:
        plan = behind_barrier(plan)
    profile = case.profile.in_order_of(plan.tensors)
    took_ns = iteration_ns(accepted(plan, profile, case.place), profile, case.where)
    expected_ns = with_overhead(took_ns, plan, case.where)
    return Option(name, took_ns, expected_ns, 0.0, len(plan.messages), why_not_ddp(plan) is None, plan)


def _covering(profile: Profile, alone_ns: int) -> Profile:
    """`profile` with the rest of a step of `alone_ns` as uncovered time, or stretched if steps take less."""
    rest_ns = alone_ns - profile.compute_ns
    if rest_ns < 0:
        return profile.stretched(alone_ns / profile.compute_ns)
    return structs.replace(profile, uncovered_ns=profile.uncovered_ns + rest_ns)
