"""Plans that torch's own DistributedDataParallel can carry out, as its keyword arguments."""

from __future__ import annotations

from gradlane.core.plan import Plan
from gradlane.errors import InputError

_MIB = 2**20


def why_not_ddp(plan: Plan) -> str | None:
    """Why stock DDP cannot carry `plan` out; None if it can.

    DDP can if all tensors are whole and of one dtype, if each message merges neighbours in
    readiness order, and if the plan does not cross the barrier.
    """
    if plan.crosses_barrier:
        return "it crosses the barrier, and DDP waits for all gradients before the optimizer's step"
    dtypes = sorted({spec.dtype for spec in plan.tensors})
    if len(dtypes) > 1:
        return f"it has {' and '.join(dtypes)}, and DDP fills the buckets of each dtype side by side"
    expected = 0
    for place, index in enumerate(range(len(plan.messages)) if plan.sequence is None else plan.sequence):
        message = plan.messages[index]
        for piece in message.slices:
            if piece.size_bytes != plan.tensors[piece.tensor].size_bytes:
                return f"message {index} carries a part of {plan.tensors[piece.tensor].name}, and DDP does not cut tensors"
            if piece.tensor != expected:
                return f"message {index}, number {place} to start, is not next in readiness order, and DDP keeps that order"
            expected += 1
        if message.hold_until is not None:
            return f"message {index} is held back, and DDP starts a bucket as soon as it is full"
    if plan.has_windows:
        return "it has a window, and DDP hands over each bucket as soon as it is full"
    return None


def ddp_kwargs(plan: Plan) -> str:
    """Keyword arguments that make torch's DistributedDataParallel carry `plan` out, as Python.

    A bucket closes when its size reaches its cap. So a cap is the message's size less half of its
    last tensor: the bucket reaches it with that tensor and not before.

    Raises:
        InputError: DDP cannot carry the plan out; the message says why.
    """
    reason = why_not_ddp(plan)
    if reason is not None:
        raise InputError(f"--emit ddp-kwargs: stock DDP cannot carry out this {plan.policy} plan: {reason}")
    order = range(len(plan.messages)) if plan.sequence is None else plan.sequence
    groups = [plan.messages[index] for index in order]
    caps = [(group.size_bytes - group.slices[-1].size_bytes / 2) / _MIB for group in groups]
    lines = [
        f"# {plan.policy} for {plan.model}: {len(groups)} buckets, fingerprint {plan.fingerprint}",
        "# torch 2.13 or later; from the second iteration on, since DDP learns the readiness order in the first",
        f"dict(bucket_cap_mb_list={caps!r})",
    ]
    return "\n".join(lines)
