"""Executors: which of them can carry out a plan.

A field that an executor cannot honour is refused there with the reason given here, simulated and live alike, never ignored.
"""

from __future__ import annotations

from typing import Literal

from gradlane.core.plan import Plan
from gradlane.errors import PlanError

Executor = Literal["all-reduce", "parameter-server"]
"""all-reduce: torch.distributed. parameter-server: gradlane's own transport and servers. The simulator has both."""
BackendName = Literal["all-reduce", "server"]
"""What a live run calls its executor: `attach(backend=...)`."""
EXECUTORS: dict[BackendName, Executor] = {"all-reduce": "all-reduce", "server": "parameter-server"}


def why_not(plan: Plan, executor: Executor, apart: bool = False) -> str | None:
    """Why `executor` cannot carry `plan` out, or None where it can. apart: its servers have processes of their own."""
    if executor == "all-reduce" and plan.wire != "fifo":
        return (
            f"wire {plan.wire!r} needs gradlane's own transport, and all-reduce has 'fifo' only; expected servers "
            "(backend='server', simulated: --servers)"
        )
    for index, message in enumerate(plan.messages if apart else ()):
        if message.split:
            return (
                f"messages[{index}] is split into push and pull, and servers in processes of their own return a sum as soon "
                "as it is whole; expected a server in each rank's process (servers=0, simulated: --servers same --colocated)"
            )
    return None


def refuse_what_cannot_be_done(plan: Plan, backend: BackendName, apart: bool = False) -> None:
    """Raise `PlanError` for the plan fields that `backend` cannot honour. apart: its servers have processes of their own."""
    reason = why_not(plan, EXECUTORS[backend], apart)
    if reason is not None:
        raise PlanError(f"plan {plan.policy}: {reason}; gradlane policies says which policies {backend} carries")
