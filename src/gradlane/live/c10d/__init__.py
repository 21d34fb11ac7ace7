"""gradlane's transport as a backend of torch.distributed, for CPU tensors.

    import gradlane.live.c10d
    torch.distributed.init_process_group("gradlane")

Importing this module registers the backend "gradlane" and starts nothing: threads and connections
come with the first process group. See docs/c10d.md.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gradlane.live.c10d.group import Group, priority
from gradlane.live.c10d.messages import monitored_barrier
from gradlane.live.c10d.options import Options

__all__ = ["Group", "Options", "monitored_barrier", "priority", "register"]

NAME = "gradlane"


def register() -> None:
    """Register the backend "gradlane" with torch.distributed, unless it is registered already."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        # PyTorch 2.15 puts its flight recorder into the backend of a group in C++, and a group written in Python has none
        recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recorded.add(NAME)


def _create(given: Any, options: Any) -> Group:
    return Group(given.store, given.group_rank, given.group_size, given.timeout.total_seconds(), Options.of(options))


register()
