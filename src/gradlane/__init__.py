"""gradlane schedules the gradient communication of data-parallel training.

    torch.distributed.init_process_group()
    gradlane.attach(model, optimizer)

Importing gradlane imports next to nothing, so that a command can prepare for Ctrl-C first; the first use of a name imports
what it needs. Of these, only `attach` and what belongs to it import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradlane.errors import GradlaneError

if TYPE_CHECKING:
    from gradlane import policies as policies
    from gradlane.core.network import Network as Network
    from gradlane.core.plan import Plan as Plan
    from gradlane.core.profile import Profile as Profile
    from gradlane.core.timeline import Timeline as Timeline
    from gradlane.live import DistributedDataParallel as DistributedDataParallel
    from gradlane.live import IdleSession as IdleSession
    from gradlane.live import ServedSession as ServedSession
    from gradlane.live import Session as Session
    from gradlane.live import StepMetrics as StepMetrics
    from gradlane.live import VerifyOptions as VerifyOptions
    from gradlane.live import attach as attach
    from gradlane.live import attach_to_servers as attach_to_servers
    from gradlane.live import init_process_group as init_process_group
    from gradlane.live import replace_ddp as replace_ddp

__version__ = "0.1.0"
_OF_CORE = {
    "Network": "gradlane.core.network", "Plan": "gradlane.core.plan", "Profile": "gradlane.core.profile",
    "Timeline": "gradlane.core.timeline",
}  # fmt: skip
_OF_LIVE = (
    "DistributedDataParallel", "IdleSession", "ServedSession", "Session", "StepMetrics", "VerifyOptions", "attach",
    "attach_to_servers", "init_process_group", "replace_ddp",
)  # fmt: skip
__all__ = ["GradlaneError", "Network", "Plan", "Profile", "Timeline", "__version__", "policies", *_OF_LIVE]


def __getattr__(name: str) -> Any:
    if name in _OF_LIVE:
        return getattr(import_module("gradlane.live"), name)
    if name in _OF_CORE:
        return getattr(import_module(_OF_CORE[name]), name)
    if name == "policies":
        return import_module("gradlane.policies")
    raise AttributeError(f"module 'gradlane' has no attribute {name!r}")
