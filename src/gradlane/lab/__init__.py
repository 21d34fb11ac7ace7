"""A cluster in a box: each rank on an emulated host of its own, joined by shaped links, with no need for root.

    run(LabSpec(hosts=4, link_bits_per_second=parse_rate("500mbit")), ["python", "train.py"])

A host is a network namespace; the kernel removes hosts, links and processes when the run ends, however it ends.
Nothing outside of these namespaces is changed, and nothing inside reaches the network outside.
"""

from gradlane.lab.launcher import execute, run, supported
from gradlane.lab.spec import LabSpec, Outcome

__all__ = ["LabSpec", "Outcome", "execute", "run", "supported"]
