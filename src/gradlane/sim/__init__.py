"""Virtual-time driver of the Dispatcher."""

from gradlane.sim.allreduce import iteration_ns, planned_ahead, simulate

__all__ = ["iteration_ns", "planned_ahead", "simulate"]
