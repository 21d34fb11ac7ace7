"""Planning: the iterations before the policy's plan is in force, and the agreement on it.

Iteration 0 counts how often each gradient hook fires in one backward pass; the next few are measured. All
under DDP's buckets and behind the barrier, which is safe whatever the model does. Then rank 0 plans from
the readiness of all ranks, and every rank proves that it holds the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from gradlane.core import files
from gradlane.core.checks import check_plan
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile, TensorSpec
from gradlane.errors import MismatchError
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import LEAST_STABLE, ProfileBuilder
from gradlane.planning.plans import accepted, make_plan
from gradlane.planning.ranking import simulated_ns

Collective = Callable[[Callable[[], Any]], None]
"""Runs a blocking collective and turns its failure into a typed error."""


class Planner:
    """Owned by a session; used on the training thread between iterations only."""

    def __init__(
        self,
        policy: Policy | Plan,
        place: Place,
        profile: Profile | None,
        specs: Sequence[TensorSpec],
        iterations: int,
        until_stable: bool = False,
    ) -> None:
        """iterations: measured before the plan. until_stable: fewer, where the times of gradients repeat themselves before."""
        self.place = place
        self.profile = profile
        self.crosses = True
        """Whether the next forward pass can begin before all sums have come, as far as the first iterations have shown."""
        self.builder = ProfileBuilder(specs)
        self._policy = policy
        has_order = isinstance(policy, Plan) and (policy.sequence is not None or not place.needs_sequence)
        self._measures = profile is None and not has_order
        self._iterations = iterations if self._measures else 0
        self._until_stable = until_stable and self._measures

    @property
    def network(self) -> Network:
        """The network that is planned for; whoever sees it change sets it anew."""
        return self.place.network

    @network.setter
    def network(self, network: Network) -> None:
        self.place = msgspec.structs.replace(self.place, network=network)

    def measures(self, iteration: int) -> bool:
        """Whether this iteration goes into the profile."""
        return self._measures and 0 < iteration <= self._iterations

    def is_due(self, driver: Driver) -> bool:
        """Whether the plan can be made, the iteration before being over: on all ranks alike."""
        if driver.iteration >= self._iterations:
            return True
        if not self._until_stable or driver.iteration < LEAST_STABLE:
            return False
        return bool(driver.decide(int(self.builder.is_stable()) if driver.rank == 0 else None))

    def decide(self, model: str, device: torch.device, backend: Backend, collective: Collective) -> Plan:
        """The plan of rank 0, agreed upon by all. Raises `MismatchError`, and `PlanError` for a bad policy."""
        group = backend.control_group
        if self._measures:
            ready = torch.tensor(self.builder.ready_medians(), dtype=torch.int64, device=backend.control_device)
            collective(lambda: dist.all_reduce(ready, group=group))
            world = dist.get_world_size(group)
            self.profile = self.builder.build(model, str(device), [int(total) // world for total in ready.tolist()])
        plan = self._share(self._plan(self._policy), backend, collective)
        check_fits(plan, self.builder.specs)
        return plan

    def change(self, policy: Policy | Plan | None, backend: Backend, collective: Collective) -> Plan:
        """Another plan for the profile that there is: of rank 0's `policy` (None elsewhere), agreed upon by all."""
        plan = None if policy is None else self._plan(policy)
        return self._share(plan, backend, collective)

    def simulated_ns(self, policy: Policy) -> int:
        """How long an iteration is expected to take under `policy`, at the place that is planned for."""
        assert self.profile is not None, "there is a profile once the first plan is decided"
        return simulated_ns(make_plan(policy, self.profile, self.place), self.profile, self.place)

    def _plan(self, policy: Policy | Plan) -> Plan:
        profile = self.profile
        if profile is None:
            assert isinstance(policy, Plan)
            return policy
        if not isinstance(policy, Plan):
            return make_plan(policy, profile, self.place)
        return accepted(policy, profile.in_order_of(policy.tensors), self.place)

    @staticmethod
    def _share(own: Plan | None, backend: Backend, collective: Collective) -> Plan:
        """Rank 0's plan (the others' own do not count) on every rank; its fingerprint compared over all of them."""
        group, device = backend.control_group, backend.control_device
        data = files.dumps(own) if own is not None else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=device)
        collective(lambda: dist.broadcast(size, group_src=0, group=group))
        payload = torch.zeros(int(size), dtype=torch.uint8, device=device)
        rank = dist.get_rank(group)
        if rank == 0:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        collective(lambda: dist.broadcast(payload, group_src=0, group=group))
        plan = files.loads(payload.cpu().numpy().tobytes(), Plan)
        mine = int(plan.fingerprint, 16) >> 1  # fits a signed 64-bit integer
        prints = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
        prints[rank] = mine
        collective(lambda: dist.all_reduce(prints, group=group))
        for other, theirs in enumerate(prints.tolist()):
            if theirs != mine:
                raise MismatchError(f"rank {other} holds another plan than rank {rank}: {theirs:x} and {mine:x}")
        return plan


def check_fits(plan: Plan, specs: Sequence[TensorSpec]) -> None:
    """Raise `PlanError` unless `plan` moves exactly the tensors of a model with `specs`, in whatever order."""
    by_name = {spec.name: spec for spec in specs}
    in_order = [by_name.pop(spec.name) for spec in plan.tensors if spec.name in by_name]
    check_plan(plan, (*in_order, *by_name.values()))
