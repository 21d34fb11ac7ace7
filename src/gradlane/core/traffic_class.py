"""Marks: how a lane's packets say their class to the network and to the host's own queue."""

from __future__ import annotations

from typing import NamedTuple

from gradlane.core.plan import Plan

DSCP = (46, 34, 26, 18, 10, 0, 0, 0)
"""By network priority: EF, AF41, AF31, AF21, AF11, best effort."""


class TrafficClass(NamedTuple):
    """DSCP (0 to 63) in each packet's header, SO_PRIORITY (0 to 6, what needs no privilege) for the host's queue."""

    dscp: int = 0
    socket_priority: int = 0


def traffic_class_of(network_priority: int) -> TrafficClass:
    """Of a lane whose class is `network_priority` (0 highest, to 7)."""
    return TrafficClass(DSCP[network_priority], max(0, 6 - network_priority))


def traffic_classes(plan: Plan) -> tuple[TrafficClass, ...]:
    """How each lane of `plan` is marked: not at all where no lane asks for another class than the first."""
    classes = [lane.network_priority for lane in plan.lanes]
    if not any(classes):
        return (TrafficClass(),) * len(classes)
    return tuple(traffic_class_of(priority) for priority in classes)
