"""The live driver: a running PyTorch job with its gradients scheduled. The only package that imports torch.

Each name is imported when it is first used, so that `startup.boot` runs before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradlane.live.ddp import DistributedDataParallel as DistributedDataParallel
    from gradlane.live.ddp import replace_ddp as replace_ddp
    from gradlane.live.remote_update import ServedSession as ServedSession
    from gradlane.live.remote_update import attach_to_servers as attach_to_servers
    from gradlane.live.session.idle import IdleSession as IdleSession
    from gradlane.live.session.metrics import StepMetrics as StepMetrics
    from gradlane.live.session.session import Session as Session
    from gradlane.live.session.verification import VerifyOptions as VerifyOptions
    from gradlane.live.startup.attach import attach as attach
    from gradlane.live.startup.rendezvous import init_process_group as init_process_group

_MODULES = {
    "DistributedDataParallel": "ddp",
    "IdleSession": "session.idle",
    "ServedSession": "remote_update",
    "Session": "session.session",
    "StepMetrics": "session.metrics",
    "VerifyOptions": "session.verification",
    "attach": "startup.attach",
    "attach_to_servers": "remote_update",
    "init_process_group": "startup.rendezvous",
    "replace_ddp": "ddp",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gradlane.live' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gradlane.live.{_MODULES[name]}"), name)
