"""Which files read the environment: commands, what starts a process, and what torchrun tells a rank."""

from __future__ import annotations

from pathlib import Path

import gradlane

ROOT = Path(gradlane.__file__).parent

# what a launcher or torchrun says to the ranks, and what an emulated host says to its processes
STARTUP = {
    "emulation/model.py",  # the lab's scale and slowness of a device
    "lab/card.py",  # whether this is an emulated host
    "lab/launcher.py",  # handed on to ranks
    "lab/ranks.py",
    "lifetime.py",  # who started this process
    "compare/processes.py",
    "live/backends/addresses.py",  # MASTER_ADDR, MASTER_PORT
    "live/c10d/options.py",  # GRADLANE_STALL_TIMEOUT
    "live/ddp/watch.py",  # RANK
    "live/startup/boot.py",  # the options of `gradlane launch`
    "live/startup/children.py",  # RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT, and which rank a process comes from
    "live/startup/launched.py",  # the same, where a script was started in another way
    "live/startup/rendezvous.py",  # RANK, WORLD_SIZE, MASTER_PORT
    "live/startup/validation.py",  # WORLD_SIZE
    "testing/planned_anew.py",  # handed on to another interpreter
    "transport/host.py",  # GRADLANE_SHARED_MEMORY
    "plugin/meeting.py",  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
}


def test_beside_commands_only_what_starts_a_process_or_a_rank_reads_the_environment():
    reading = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if "os.environ" in path.read_text() or "os.getenv" in path.read_text()
    }
    assert {path for path in reading if not path.startswith("cli/")} == STARTUP
