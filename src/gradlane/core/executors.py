"""Executors: which of them can carry out a plan.

A field that an executor cannot honour is refused there with the reason given here, never ignored.
"""

from __future__ import annotations

from typing import Literal

from gradlane.core.plan import Plan

Executor = Literal["all-reduce", "parameter-server"]
"""all-reduce: torch.distributed. parameter-server: gradlane's own transport and servers. The simulator has both."""
BackendName = Literal["all-reduce", "server"]
"""What a live run calls its executor: `attach(backend=...)`."""
EXECUTORS: dict[BackendName, Executor] = {"all-reduce": "all-reduce", "server": "parameter-server"}


def why_not(plan: Plan, executor: Executor) -> str | None:
    """Why `executor` cannot carry `plan` out, or None where it can."""
    if executor == "all-reduce" and plan.wire != "fifo":
        return f"wire {plan.wire!r} needs gradlane's own transport; all-reduce has 'fifo' only"
    return None


def why_not_apart(plan: Plan) -> str | None:
    """Why servers in processes of their own cannot carry `plan` out in a live run, or None where they can."""
    for index, message in enumerate(plan.messages):
        if message.split:
            return (
                f"messages[{index}] is split into push and pull, and servers in processes of their own return a sum as soon "
                "as it is whole; expected a server in each rank's process (servers=0)"
            )
    return None
