"""Profiling: the iterations before the policy's plan comes into force, and the ranks' agreement on
that plan.

Iteration 0 counts how often each gradient hook fires in one backward pass; the next few are
measured. All of them use DDP's buckets and wait for every update before the next forward pass,
which is safe whatever the model does. Then rank 0 plans from the times at which gradients became
ready, averaged over ranks, and all ranks compare the plan's fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import UNSET, UnsetType, structs

from gradlane.core import files
from gradlane.core.backends import BackendName
from gradlane.core.checks import check_plan
from gradlane.core.network import Network
from gradlane.core.place import Place, place_of
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile, TensorSpec
from gradlane.errors import MismatchError
from gradlane.live.adapt.profile_builder import LEAST_STABLE, ProfileBuilder
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.torch_versions import broadcast_from
from gradlane.planning.plans import accepted, make_plan
from gradlane.planning.ranking import simulated_ns

Collective = Callable[[Callable[[], Any]], Any]
"""Runs a call that waits for other ranks, returns what it returns, and raises its failure as a typed error."""


class Planner:
    """Makes a session's plans. Owned by the session. Plans are made on the training thread, between iterations; `measures` and
    `builder` are used within them, on any thread.

    Args:
        policy: what to plan with, or a plan made before.
        places: the network, with what carries messages there; several, each with a backend of its
            own, if the session chooses between backends while it trains.
        profile: to plan from; None to measure one.
        specs: the model's tensors, as they travel.
        iterations: how many to measure before there is a plan.
        until_stable: end measuring sooner if gradients become ready at the same times again and
            again.
        wire_dtype: as what float32 gradients travel; None if they travel as they are.
    """

    def __init__(
        self,
        policy: Policy | Plan,
        places: Sequence[Place],
        profile: Profile | None,
        specs: Sequence[TensorSpec],
        iterations: int,
        until_stable: bool = False,
        wire_dtype: str | None = None,
    ) -> None:
        self.places = tuple(places)
        self.place = self.places[0]
        """The one of `places` at which the plan in force is carried out. A controller that sees the
        network change calls `plan_for`.
        """
        self.profile = profile
        self.crosses = True
        """Whether the next forward pass may begin before all sums have arrived. The first
        iterations tell: it may not if the script reads all gradients before `step()`.
        """
        self.clips: float | None = None
        """The order of the norms that are all that the script reads of its gradients before `step()`, as
        `clip_grad_norm_` does. Plans whose owners tell such norms may cross the barrier nevertheless.
        """
        self.builder = ProfileBuilder(specs, wire_dtype)
        self._policy = policy
        has_order = isinstance(policy, Plan) and (policy.sequence is not None or not self.place.needs_sequence)
        self._measures = profile is None and not has_order
        self._iterations = iterations if self._measures else 0
        self._until_stable = until_stable and self._measures

    @property
    def network(self) -> Network:
        """The network of `place`."""
        return self.place.network

    def learn(self, may_cross: bool, always_read: bool, norms: float | None) -> None:
        """Take note of what the first iterations have told.

        Args:
            may_cross: updates may be deferred.
            always_read: the script has read gradients before `step()` in every iteration.
            norms: the order of their norms, if it has read nothing else.
        """
        self.crosses = may_cross and not always_read
        self.clips = norms if may_cross else None

    @property
    def some_cross(self) -> bool:
        """Whether some plans may cross the barrier, at least those whose owners tell norms."""
        return self.crosses or self.clips is not None

    def crosses_with(self, plan: Plan) -> bool:
        """Whether the next forward pass may begin before all sums of `plan` have arrived."""
        return plan.crosses_barrier and (self.crosses or plan.tells_norms(self.clips))

    def plan_for(self, places: Sequence[Place]) -> None:
        """Plan for other networks from now on: `places` with the backends of before."""
        self.places, self.place = tuple(places), place_of(self.place.backend, places)

    @property
    def ready_ns(self) -> dict[str, int] | None:
        """By tensor name, when its gradient is ready in a backward pass, in ns; None without a
        profile.
        """
        return None if self.profile is None else {each.spec.name: each.ready_ns for each in self.profile.tensors}

    def measures(self, iteration: int) -> bool:
        """Whether `iteration` is measured for the profile."""
        return self._measures and 0 < iteration <= self._iterations

    def is_due(self, driver: Driver, read: Callable[[], None]) -> bool:
        """Whether enough iterations were measured to plan. Called between two iterations; the same
        on all ranks.

        Args:
            driver: of the session.
            read: called before what was measured is looked at, now or by `decide`.
        """
        if driver.iteration < self._iterations and not (self._until_stable and driver.iteration >= LEAST_STABLE):
            return False
        read()
        if driver.iteration >= self._iterations:
            return True
        return bool(driver.decide(int(self.builder.is_stable()) if driver.rank == 0 else None))

    def decide(self, model: str, device: torch.device, backend: Backend, collective: Collective) -> Plan:
        """Make the session's first plan (collective).

        Args:
            model: the model's name, for the profile.
            device: that the model is on.
            backend: its control group carries the agreement.
            collective: see `Collective`.

        Returns:
            Rank 0's plan, on every rank.

        Raises:
            MismatchError: a rank holds another plan than rank 0.
            PlanError: the policy made a plan that does not fit the model.
        """
        group = backend.control_group
        if self._measures:
            ready = torch.tensor(self.builder.ready_medians(), dtype=torch.int64, device=backend.control_device)

            def add_up() -> list[int]:
                dist.all_reduce(ready, group=group)
                return [int(total) for total in ready.tolist()]

            world = dist.get_world_size(group)
            self.profile = self.builder.build(model, str(device), [total // world for total in collective(add_up)])
        plan = self._share(self._plan(self._policy, UNSET), backend, collective)
        check_fits(plan, self.builder.specs)
        return plan

    def change(
        self, policy: Policy | Plan | None, backend: Backend, collective: Collective, over: BackendName | UnsetType = UNSET
    ) -> Plan:
        """Make another plan for the present profile and network (collective).

        Args:
            policy: rank 0's policy or plan; None on other ranks.
            backend, collective: as for `decide`.
            over: what is to carry the plan of a policy, where there are several places; UNSET for
                the first of them. A plan names its own.

        Returns:
            Rank 0's plan, on every rank.

        Raises:
            MismatchError: a rank holds another plan than rank 0.
        """
        plan = None if policy is None else self._plan(policy, over)
        return self._share(plan, backend, collective)

    def simulated_ns(self, policy: Policy) -> int:
        """Simulated iteration time under `policy`, in ns, for the present profile and place."""
        assert self.profile is not None, "there is a profile once the first plan is decided"
        return simulated_ns(make_plan(policy, self.profile, self.place), self.profile, self.place)

    def fingerprint_of(self, policy: Policy) -> str:
        """The fingerprint of the plan that `policy` makes for the present profile and place."""
        return self._plan(policy, UNSET).fingerprint

    def _plan(self, policy: Policy | Plan, over: BackendName | UnsetType) -> Plan:
        profile = self.profile
        if profile is None:
            assert isinstance(policy, Plan)
            return policy
        place = place_of(policy.backend if isinstance(policy, Plan) else over, self.places)
        if isinstance(policy, Plan):
            plan = accepted(policy, profile.in_order_of(policy.tensors), place)
        else:
            plan = make_plan(policy, profile, place)
        return structs.replace(plan, backend=place.backend) if len(self.places) > 1 else plan

    def _share(self, own: Plan | None, backend: Backend, collective: Collective) -> Plan:
        """Broadcast rank 0's plan and compare its fingerprint over all ranks; other ranks' `own` is
        ignored. `place` is that of the plan from now on.
        """
        plan: Plan = collective(lambda: _exchange(own, backend.control_group, backend.control_device))
        self.place = place_of(plan.backend, self.places)
        return plan


def _exchange(own: Plan | None, group: Any, device: torch.device) -> Plan:
    """Broadcast rank 0's plan, and compare its fingerprint over all ranks (collective)."""
    data = files.dumps(own) if own is not None else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    broadcast_from(0, size, group)
    payload = torch.zeros(int(size), dtype=torch.uint8, device=device)
    rank = dist.get_rank(group)
    if rank == 0:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    broadcast_from(0, payload, group)
    plan = files.loads(payload.cpu().numpy().tobytes(), Plan)
    mine = int(plan.fingerprint, 16) >> 1  # fits a signed 64-bit integer
    prints = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    prints[rank] = mine
    dist.all_reduce(prints, group=group)
    for other, theirs in enumerate(prints.tolist()):
        if theirs != mine:
            raise MismatchError(f"rank {other} holds another plan than rank {rank}: {theirs:x} and {mine:x}")
    return plan


def check_fits(plan: Plan, specs: Sequence[TensorSpec]) -> None:
    """Raise `PlanError` unless `plan` moves exactly the tensors of a model with `specs`, in
    whatever order.
    """
    by_name = {spec.name: spec for spec in specs}
    named = [by_name.pop(spec.name, None) for spec in plan.tensors]
    others = iter(by_name.values())  # one with another name stands where the plan has none, so that an error names both
    in_order = [spec or next(others, None) for spec in named]
    check_plan(plan, (*filter(None, in_order), *others))
