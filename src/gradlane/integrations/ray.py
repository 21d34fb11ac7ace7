"""Ray Train, whose DistributedDataParallel is gradlane's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlane.errors import UnsupportedError
from gradlane.live.ddp import DistributedDataParallel
from gradlane.plugin.installed import needs

with needs("ray", "gradlane.integrations.ray", install="ray[train]"):
    import ray.train.torch


def prepare_model(
    model: Any,
    move_to_device: Any = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """In place of `ray.train.torch.prepare_model`, in the function that Ray Train runs on each worker.

    Args:
        model: a module, as Ray's takes.
        move_to_device: Ray's: whether to move the model to the worker's device, or which device to move it to.
        parallel_strategy: "ddp", or None for a model that is moved only.
        parallel_strategy_kwargs: keywords for DistributedDataParallel.
        options: keywords for `gradlane.attach`.

    Returns:
        `gradlane.DistributedDataParallel`; the module itself where one worker trains alone.

    Raises:
        UnsupportedError: another strategy, such as "fsdp", whose sums gradlane does not schedule.
    """
    if parallel_strategy not in ("ddp", None):
        raise UnsupportedError(
            f"gradlane.integrations.ray.prepare_model: got parallel_strategy={parallel_strategy!r}, expected 'ddp' or None; "
            "use ray.train.torch.prepare_model for sharded models"
        )
    moved = ray.train.torch.prepare_model(model, move_to_device, parallel_strategy=None)
    if parallel_strategy is None or ray.train.get_context().get_world_size() == 1:
        return moved
    device = ray.train.torch.get_device() if isinstance(move_to_device, bool) else move_to_device
    devices = {} if device.type == "cpu" else {"device_ids": [device], "output_device": device}
    return DistributedDataParallel(moved, options=options, **{**devices, **(parallel_strategy_kwargs or {})})
