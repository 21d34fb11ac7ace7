"""Marks: how a lane's packets say their class to the network and to the host's own queue."""

from __future__ import annotations

from typing import NamedTuple

from gradlane.core.plan import Plan

DSCP = (46, 34, 26, 18, 10, 0, 0, 0)
"""By network priority: EF, AF41, AF31, AF21, AF11, best effort."""


class Mark(NamedTuple):
    """DSCP (0 to 63) in each packet's header, SO_PRIORITY (0 to 6, what needs no privilege) for the host's queue."""

    dscp: int = 0
    socket_priority: int = 0


def mark(network_priority: int) -> Mark:
    """Of a lane whose class is `network_priority` (0 highest, to 7)."""
    return Mark(DSCP[network_priority], max(0, 6 - network_priority))


def marks(plan: Plan) -> tuple[Mark, ...]:
    """How each lane of `plan` is marked: not at all where no lane asks for another class than the first."""
    classes = [lane.network_priority for lane in plan.lanes]
    if not any(classes):
        return (Mark(),) * len(classes)
    return tuple(mark(priority) for priority in classes)
