"""The plan of a session whose parameters are on servers: a policy divides the parameters into messages."""

from __future__ import annotations

from msgspec import UNSET

from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy, replans
from gradlane.core.profile import Layer, Profile, TensorProfile
from gradlane.errors import InputError
from gradlane.live.session.job import Job
from gradlane.planning import catalog
from gradlane.planning.plans import make_plan

_EXPECTED = "expected one that plans from sizes and sends each parameter by itself: mercury, wfbp, tictac, p3, bytescheduler"


def sending_plan(policy: str | Policy | Plan, job: Job) -> Plan:
    """The plan of `policy` for the parameters of `job`, which are in order of use.

    Raises:
        InputError: the policy needs times, which are not measured here, or its plan has messages of several parameters, of
            two phases, or in several lanes.
    """
    if isinstance(policy, Plan):
        raise InputError(f"policy: got a plan, {_EXPECTED}")
    chosen = catalog.get(policy) if isinstance(policy, str) else policy
    if replans(chosen):
        raise InputError(f"policy: got {chosen.name}, which plans from measured times, {_EXPECTED}")
    specs = job.specs[::-1]
    tensors = tuple(TensorProfile(spec, at, len(specs) - 1 - at) for at, spec in enumerate(specs))
    layers = tuple(Layer(str(index), 0) for index in range(len(specs)))
    profile = Profile(job.model_name, str(job.device), tensors, layers, len(specs), "unmeasured")
    # what the named policies do not look at: 10 Gbit/s
    plan = make_plan(chosen, profile, Place(Network.line(max(2, job.world), 30_000, 1_250_000_000), "server"))
    for message in plan.messages:
        if (
            plan.owners is not UNSET
            or len(message.slices) != 1
            or message.two_phase
            or message.hold_until is not None
            or len(plan.lanes) != 1
        ):
            raise InputError(
                f"policy: got {chosen.name}, whose messages are not all parts of one parameter in one lane, {_EXPECTED}"
            )
    return plan
