"""Virtual-time drivers of the Dispatcher: all-reduce, and parameter servers."""

from gradlane.sim.allreduce import iteration_ns, planned_ahead, simulate
from gradlane.sim.fabric import Job
from gradlane.sim.planning import accepted, make_plan
from gradlane.sim.servers import simulate_jobs, simulate_servers
from gradlane.sim.unlike import simulate_unlike

__all__ = [
    "Job",
    "accepted",
    "iteration_ns",
    "make_plan",
    "planned_ahead",
    "simulate",
    "simulate_jobs",
    "simulate_servers",
    "simulate_unlike",
]
