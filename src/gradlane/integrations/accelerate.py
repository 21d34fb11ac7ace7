"""accelerate, whose DistributedDataParallel is gradlane's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlane.live.ddp import replaced_ddp
from gradlane.plugin.installed import needs

with needs("accelerate", __name__):
    import accelerate


class Accelerator(accelerate.Accelerator):
    """accelerate's, with the same arguments and methods.

    Args:
        args: accelerate's.
        options: keywords for `gradlane.attach`.
        kwargs: accelerate's.
    """

    def __init__(self, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attach_options = dict(options or {})

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's; `prepare` calls it for each model."""
        with replaced_ddp(**self._attach_options):
            return super().prepare_model(*args, **kwargs)
