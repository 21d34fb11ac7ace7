"""Strategies for Lightning's Trainer and for Fabric, whose DistributedDataParallel is gradlane's."""

from __future__ import annotations

from typing import Any

from gradlane.live.ddp import DistributedDataParallel
from gradlane.plugin.installed import needs

with needs("lightning", __name__):
    from lightning.fabric import strategies as of_fabric
    from lightning.pytorch import strategies as of_trainer


class DDPStrategy(of_trainer.DDPStrategy):
    """Lightning's for the Trainer, with the same arguments, and `options`: keywords for `gradlane.attach`."""

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class FabricDDPStrategy(of_fabric.DDPStrategy):
    """Lightning's for Fabric, with the same arguments, and `options`: keywords for `gradlane.attach`."""

    def setup_module(self, module: Any) -> DistributedDataParallel:
        """As Lightning's."""
        return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)
