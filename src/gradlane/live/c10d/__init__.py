"""gradlane's transport as a backend of torch.distributed, for CPU tensors.

    import gradlane.live.c10d
    torch.distributed.init_process_group("gradlane")

Importing this module makes the name known; nothing else is started before a group is made. See docs/c10d.md.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gradlane.live.c10d.group import Group, priority
from gradlane.live.c10d.options import Options

__all__ = ["Group", "Options", "priority", "register"]

NAME = "gradlane"


def register() -> None:
    """Make `init_process_group("gradlane")` known to torch.distributed. May be called again."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(given: Any, options: Any) -> Group:
    return Group(given.store, given.group_rank, given.group_size, given.timeout.total_seconds(), Options.of(options))


register()
