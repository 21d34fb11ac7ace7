"""Policy: a pure function (Profile, Network) -> Plan, and the functions that policies share.

A policy is a frozen record of its knobs with a `plan` method. It has no clock and no unseeded
randomness, and does not know how a plan is carried out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from msgspec import UNSET, UnsetType

from gradlane.core.fields import MAX_MESSAGES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan, Slice, Wire
from gradlane.core.profile import DTYPE_BYTES, Profile
from gradlane.errors import InputError, PlanError
from gradlane.units import NS_PER_SECOND, format_bytes


@runtime_checkable
class Policy(Protocol):
    """Plans how the gradients of one training iteration travel.

    A class of your own needs the four members below and no base class. As a frozen
    `msgspec.Struct` its fields are its knobs: they may follow its name (`planning.catalog.parse`), and `with_knobs` makes
    a changed copy. It refuses values of no use with `InputError` in `__post_init__`.
    `gradlane.testing.policies.check_policy` checks all that is promised here.

    Four optional class attributes, and an optional method:

    - `tunable: ClassVar[dict[str, KnobRange]]`: the knobs that a search may set (see `tunable`).
    - `replans: ClassVar[bool]`: True where the plan depends on the moments at which gradients
      become ready, so that a session has to plan again when these move (see `replans`).
    - `plans_with_bus: ClassVar[bool]`: True where it plans with `Network.bus` too (see `plans_with_bus`).
    - `wire_over_servers: ClassVar[Wire]`, or a property: the plans' wire where servers carry them (see `wire_over_servers`).
    - `trials(self) -> tuple[Policy, ...]`: where it leaves a knob to be found, itself with each value to try (see `trials`).
    """

    name: ClassVar[str]
    """What users type, 1 to 1000 printable characters without a colon; `Plan.policy` repeats it."""
    paper: ClassVar[str]
    """Where it comes from, for `gradlane policies`; "none: ..." where there is no paper."""
    differs: ClassVar[str]
    """How it differs from the paper, for `gradlane policies`; "-" where it does not."""

    def plan(self, profile: Profile, network: Network) -> Plan:
        """Schedule one iteration of `profile` on `network`.

        A pure function: the same arguments give an equal plan, in every process and at any time.

        Args:
            profile: its tensors are in the order of their gradients' readiness, its layers in that of the forward pass. Sizes
                are in bytes, times in ns after the start of the backward pass. `profile.urgency()` is the order of first use.
            network: what a message costs: `cost_ns(size_bytes)`, made of a startup in ns and a rate
                in bytes a second; `workers`, 1 or more. Where hosts have several devices, it is the
                cost of a message's whole path (`Network.path`).

        Returns:
            A plan with `policy` = `name`, `model` = `profile.model`, `tensors` = `profile.specs`.
            Its messages hold every byte of every tensor once, are cut between elements, and have
            one dtype each. `sequence` may stay None: where ranks need one order, it is fixed by a
            simulation. A field that a backend cannot carry out (`gradlane.core.backends.why_not`)
            is refused there, simulated and live.

        Raises:
            InputError: the knobs do not go with this profile. A policy should rather plan
                something for every profile and network.
        """
        ...


class KnobRange(NamedTuple):
    """The values of a knob that a search tries, both ends included.

    Attributes:
        low, high: the range.
        step: None for a size in bytes, which is searched by ratio; otherwise the distance between
            values to try.
    """

    low: int
    high: int
    step: int | None = None


SIZES = KnobRange(64 * 2**10, 256 * 2**20)
"""From sizes whose per-message overhead exceeds their transfer, to sizes at which no tensor is cut.
"""

UNTIL: Mapping[str, bool | UnsetType] = {"sent": UNSET, "acknowledged": True}
"""The knob `until`, as `Lane.acknowledged`: over servers a message takes room in its window until it was sent, or is
acknowledged.
"""


def tunable(policy: Policy) -> Mapping[str, KnobRange]:
    """The knobs that a search may set, by name: the class's `tunable`, or none."""
    declared: Mapping[str, KnobRange] = getattr(type(policy), "tunable", {})
    return declared


def replans(policy: Policy) -> bool:
    """Whether a session plans with this policy again when network or profile have changed.

    Such a session first measures until gradients become ready at the same times in each iteration.
    The policy's class declares this as `replans`; the default is False.
    """
    declared: bool = getattr(type(policy), "replans", False)
    return declared


def plans_with_bus(policy: Policy) -> bool:
    """Whether the policy plans with the whole network, its bus included, rather than with `Network.path`.

    The policy's class declares this as `plans_with_bus`; the default is False.
    """
    declared: bool = getattr(type(policy), "plans_with_bus", False)
    return declared


def wire_over_servers(policy: Policy) -> Wire | None:
    """The wire that the policy's plans have over servers. Over all-reduce nothing is returned, so that they have none there.

    The policy declares this as `wire_over_servers`; the default is None, for the wire of `policy.plan`.
    """
    declared: Wire | None = getattr(policy, "wire_over_servers", None)
    return declared


def trials(policy: Policy) -> tuple[Policy, ...]:
    """The policies that `planning.plans.make_plan` tries in place of `policy`; it takes the fastest in the simulator.

    The policy's class declares them by a method `trials`. Without one there are none, and `policy` itself is planned.
    """
    declared: Callable[[], tuple[Policy, ...]] | None = getattr(policy, "trials", None)
    found = declared() if declared is not None else ()
    if not isinstance(found, tuple) or not all(isinstance(each, Policy) for each in found):
        raise PlanError(f"policy {policy.name}: trials() returned {found!r}, expected a tuple of policies")
    return found


def whole(profile: Profile, tensor: int) -> Slice:
    """The slice that covers all of one tensor."""
    return Slice(tensor, 0, profile.tensors[tensor].spec.size_bytes)


def merge(profile: Profile, tensors: Iterable[int], priority: int = 0) -> list[Message]:
    """Merge whole tensors into one message, or into one for each run of equal dtype (a sum has one
    dtype).

    Args:
        profile: the profile that has the tensors.
        tensors: their indices, in the order in which the message carries them.
        priority: the messages' priority.
    """
    runs: list[list[int]] = []
    for tensor in tensors:
        dtype = profile.tensors[tensor].spec.dtype
        if runs and profile.tensors[runs[-1][-1]].spec.dtype == dtype:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return [Message(tuple(whole(profile, tensor) for tensor in run), priority) for run in runs]


def balanced_bytes(model_bytes: int, network: Network, in_flight: int) -> int:
    """The size at which startups cost as much as an urgent message waits: b = sqrt(a S r / w).

    Messages of b bytes cost S / b startups a for a model of S bytes. An urgent one waits for the w messages in flight
    at rate r. The sum a S / b + w b / r is least at that b.

    Args:
        model_bytes: S.
        network: has a and r.
        in_flight: w, 1 or more.
    """
    return math.isqrt(network.startup_ns * model_bytes * network.bytes_per_second // (in_flight * NS_PER_SECOND))


def check_cuts(profile: Profile, slice_bytes: int, knob: str) -> None:
    """Check that a plan of slices of at most `slice_bytes` has no more messages than a plan may have.

    A policy calls it before it cuts: a small file can describe a tensor of any size.

    Args:
        profile: whose tensors are cut.
        slice_bytes: the largest slice.
        knob: the policy's knob for that size, for the error.

    Raises:
        InputError: there would be more than `MAX_MESSAGES`; with their number, and the value of the
            knob that makes them fewer.
    """
    messages = sum(-(-seen.spec.size_bytes // slice_bytes) for seen in profile.tensors)
    if messages > MAX_MESSAGES:
        enough = -(-profile.size_bytes // max(1, MAX_MESSAGES - len(profile.tensors)))
        raise InputError(
            f"{knob}: got {slice_bytes}, with which the {format_bytes(profile.size_bytes)} of {profile.model} would travel in "
            f"{messages} messages, expected at most {MAX_MESSAGES}; with {knob} = {-(-enough // 8) * 8} they are as few"
        )


def cut(profile: Profile, tensor: int, slice_bytes: int) -> list[Slice]:
    """Cut one tensor between elements into slices of at most `slice_bytes`; the last may be
    shorter.

    Raises:
        InputError: `slice_bytes` is less than one element, or so small that this tensor alone is
            cut into more slices than a plan may have messages.
    """
    spec = profile.tensors[tensor].spec
    element = DTYPE_BYTES[spec.dtype]
    need_int("slice_bytes", slice_bytes, max(element, -(-spec.size_bytes // MAX_MESSAGES)), 2**50)
    step = slice_bytes - slice_bytes % element
    return [Slice(tensor, start, min(step, spec.size_bytes - start)) for start in range(0, spec.size_bytes, step)]


def sliced_by_urgency(profile: Profile, slice_bytes: int, knob: str) -> tuple[Message, ...]:
    """Every tensor in slices of at most `slice_bytes`, one message each, with the priority of first
    use.

    Raises:
        InputError: as `check_cuts`, which `knob` is for.
    """
    check_cuts(profile, slice_bytes, knob)
    urgency = profile.urgency()
    return tuple(
        Message((piece,), priority=urgency[tensor])
        for tensor in range(len(profile.tensors))
        for piece in cut(profile, tensor, slice_bytes)
    )
