"""Traffic classes: how a lane's packets tell the network and the host's own queue their priority."""

from __future__ import annotations

from typing import NamedTuple

from gradlane.core.plan import Plan

DSCP = (46, 34, 26, 18, 10, 0, 0, 0)
"""DSCP by network priority 0 to 7: EF, AF41, AF31, AF21, AF11, then best effort."""


class TrafficClass(NamedTuple):
    """How packets are marked.

    Attributes:
        dscp: 0 to 63, in each packet's IP header, for switches.
        socket_priority: SO_PRIORITY, for the host's queueing discipline; 0 to 6 need no privilege.
    """

    dscp: int = 0
    socket_priority: int = 0


def traffic_class_of(network_priority: int) -> TrafficClass:
    """The traffic class of a lane with `network_priority` 0 (highest) to 7."""
    return TrafficClass(DSCP[network_priority], max(0, 6 - network_priority))


def traffic_classes(plan: Plan) -> tuple[TrafficClass, ...]:
    """The traffic class of each lane of `plan`; unmarked if all lanes have the highest priority."""
    classes = [lane.network_priority for lane in plan.lanes]
    if not any(classes):
        return (TrafficClass(),) * len(classes)
    return tuple(traffic_class_of(priority) for priority in classes)
