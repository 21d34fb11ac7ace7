"""A forked child frees nothing that its parent left in cycles."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, os, sys
from gradlane.transport.forks import collect_nothing_inherited

class Event:
    def __del__(self):
        freed_in.append(os.getpid())

def in_a_cycle():
    event = Event()
    event.itself = event

freed_in, parent = [], os.getpid()
gc.disable() if sys.argv[2] == "off" else gc.enable()
if sys.argv[1] == "spared":
    collect_nothing_inherited()
in_a_cycle()
child = os.fork()
if child == 0:
    in_a_cycle()
    gc.collect()
    os._exit(10 * len(freed_in) + gc.isenabled())
_, status = os.waitpid(child, 0)
gc.collect()
print(os.waitstatus_to_exitcode(status), freed_in == [parent], gc.isenabled())
"""


@pytest.mark.parametrize(("how", "freed"), [("as ever", 2), ("spared", 1)])
@pytest.mark.parametrize("collecting", ["on", "off"])
def test_a_child_frees_its_own_garbage_and_its_parents_only_as_ever(how, freed, collecting):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, collecting], capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    assert done.stdout.split() == [str(10 * freed + (collecting == "on")), "True", str(collecting == "on")]
