"""Virtual-time driver of the Dispatcher."""

from gradlane.sim.allreduce import planned_ahead, simulate

__all__ = ["planned_ahead", "simulate"]
