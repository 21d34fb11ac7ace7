"""Virtual-time drivers of the Dispatcher: all-reduce and parameter servers."""

from gradlane.sim.allreduce import simulate, simulate_heterogeneous
from gradlane.sim.fabric import Job
from gradlane.sim.servers import simulate_jobs, simulate_servers, simulate_steady
from gradlane.sim.sharding import few_packets
from gradlane.sim.steady import iteration_ns, planned_ahead, steady_iteration

__all__ = [
    "Job",
    "few_packets",
    "iteration_ns",
    "planned_ahead",
    "simulate",
    "simulate_heterogeneous",
    "simulate_jobs",
    "simulate_servers",
    "simulate_steady",
    "steady_iteration",
]
