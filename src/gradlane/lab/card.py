"""What an emulated host's network card has sent, as a process on that host reads it."""

from __future__ import annotations

import os
from pathlib import Path

from gradlane.lab.processes import INTERFACE


def sent_bytes() -> int | None:
    """Bytes that this host has sent to its link, with all headers but Ethernet's preamble and checksum.

    Returns:
        None outside of a lab, where a card also carries what is not the job's.
    """
    if os.environ.get("GRADLANE_LAB") != "1":
        return None
    # the file of this process's network namespace; /sys shows that in which it was mounted
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == INTERFACE:
            return int(counters.split()[8])
    return None
