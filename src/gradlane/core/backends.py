"""Backends: what carries messages, and which plans each can carry.

A backend refuses a plan field that it cannot honour. The simulator and a live session give the same
reason, from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from msgspec import UNSET

from gradlane.errors import PlanError

if TYPE_CHECKING:
    from gradlane.core.plan import Plan

BackendName = Literal["all-reduce", "server"]
"""all-reduce: torch.distributed. server: gradlane's own transport and parameter servers. The simulator has both."""
Algorithm = Literal["flat", "hierarchical"]
"""Of all-reduce: over all ranks at once, or within each host first."""
SummationOrder = Literal["arrival", "rank"]
"""Of the server backend: a packet is added when it comes, or all in the order of ranks."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
HIERARCHICAL_PAYS = 1.05
"""Sums stay flat unless they were measured to take longer than hierarchical ones by this factor."""
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
BUS_KNOWS_NO_OWNERS = "its tensors have owners, which sums within hosts first do not know"


def why_not(plan: Plan, backend: BackendName, external: bool = False, in_stream: bool = False) -> str | None:
    """Why a backend cannot carry a plan.

    Args:
        plan: the plan to be carried.
        backend: "all-reduce" or "server".
        external: whether the servers run in processes of their own.
        in_stream: whether all-reduces take their turn in a stream of a device, as NCCL's do.

    Returns:
        The reason, or None if `backend` can carry `plan`.
    """
    if plan.backend is not UNSET and plan.backend != backend:
        return f"it was made for backend {plan.backend!r}, and this is {backend!r}; expected backend={plan.backend!r}, or none"
    if backend == "all-reduce" and plan.wire != "fifo":
        return (
            f"wire {plan.wire!r} needs gradlane's own transport, and all-reduce has 'fifo' only; expected servers "
            "(backend='server', simulated: --servers)"
        )
    if in_stream and len(plan.lanes) > 1:
        return (
            f"it has {len(plan.lanes)} lanes, each with a communicator of its own, and NCCL's communicators may wait for one "
            "another for ever if ranks start messages in different orders; expected a plan with one lane, a process group "
            "with Gloo, or backend='server'"
        )
    if plan.owners is not UNSET and external:
        return (
            "its tensors have owners, which are ranks, and servers in processes of their own have the sums; expected a "
            "policy without owners here, backend='all-reduce', or a server in each rank's process (servers=0, simulated: "
            "--servers same --colocated)"
        )
    if plan.owners is not UNSET and backend == "server" and plan.has_windows:
        return (
            "its tensors have owners, and a lane has a window: servers have no agreed order, so that ranks whose windows hold "
            "different messages would wait for one another for ever; expected lanes without windows, or backend='all-reduce'"
        )
    for index, message in enumerate(plan.messages if external else ()):
        if message.two_phase:
            return (
                f"messages[{index}] is split into push and pull, and servers in processes of their own return a sum as soon "
                "as it is whole; expected a server in each rank's process (servers=0, simulated: --servers same --colocated)"
            )
    return None


def refuse_what_cannot_be_done(plan: Plan, backend: BackendName, external: bool = False, in_stream: bool = False) -> None:
    """Raise `PlanError` if `backend` cannot carry `plan`, with the reason from `why_not`."""
    reason = why_not(plan, backend, external, in_stream)
    if reason is not None:
        raise PlanError(f"plan {plan.policy}: {reason}; gradlane policies says which policies {backend} carries")


def refuse_owners_beyond(plan: Plan, ranks: int) -> None:
    """Raise `PlanError` unless all owners of the plan's tensors are among so many ranks."""
    if plan.owners is not UNSET and max(plan.owners.ranks) >= ranks:
        raise PlanError(f"plan {plan.policy}: got rank {max(plan.owners.ranks)} as an owner, expected one of {ranks} ranks")
