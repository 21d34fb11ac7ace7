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


def why_not_all_reduce(plan: Plan) -> str | None:
    """Why torch.distributed's all-reduce cannot carry `plan` out, or None where it can."""
    if plan.wire != "fifo":
        return f"wire {plan.wire!r} needs gradlane's own transport; all-reduce has 'fifo' only"
    for index, lane in enumerate(plan.lanes):
        if lane.network_priority != 0:
            return (
                f"lanes[{index}] asks for network priority {lane.network_priority}; torch.distributed cannot mark its "
                "traffic, expected 0"
            )
    for index, message in enumerate(plan.messages):
        if message.split:
            return f"messages[{index}] is split into reduce-scatter and all-gather; all-reduce does both in one"
    return None


def why_not_servers(plan: Plan) -> str | None:
    """Why parameter servers cannot carry `plan` out, or None where they can."""
    for index, message in enumerate(plan.messages):
        if message.split:
            return f"messages[{index}] is split into reduce-scatter and all-gather; servers push and pull"
    return None


def why_not(plan: Plan, executor: Executor) -> str | None:
    """Why `executor` cannot carry `plan` out, or None where it can."""
    return why_not_all_reduce(plan) if executor == "all-reduce" else why_not_servers(plan)
