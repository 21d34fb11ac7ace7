"""What starting messages takes from computing (`Network.start_ns`).

A collective is started by the thread that computes, between two layers of the backward pass, and
that thread computes nothing meanwhile. So every gradient after it is ready later, by that much.
"""

from __future__ import annotations

import msgspec

from gradlane.core.plan import Plan
from gradlane.core.profile import Profile


def delayed(plan: Plan, profile: Profile, start_ns: int) -> Profile:
    """The computation of one iteration in which the messages of a plan are started.

    A message counts as started when the last gradient that it waits for is ready. If a window
    keeps it longer, another thread starts it, and the interpreter's lock makes the one that
    computes wait as long.

    Args:
        plan: its tensors are those of `profile`.
        profile: one iteration's computation, in which nothing is started.
        start_ns: what one start takes.

    Returns:
        The profile with its gradients ready, and its backward pass ended, as much later.
    """
    if not start_ns:
        return profile
    starts = [0] * len(profile.tensors)
    for message in plan.messages:
        starts[max(*message.tensors, message.hold_until or 0)] += 1
    tensors, later_ns = [], 0
    for seen, count in zip(profile.tensors, starts, strict=True):
        tensors.append(msgspec.structs.replace(seen, ready_ns=seen.ready_ns + later_ns))
        later_ns += count * start_ns
    return msgspec.structs.replace(profile, tensors=tuple(tensors), backward_ns=profile.backward_ns + later_ns)
