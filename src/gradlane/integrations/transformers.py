"""The Trainer of transformers, whose DistributedDataParallel is gradlane's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlane.live.ddp import replaced_ddp
from gradlane.plugin.installed import needs

with needs("transformers", __name__):
    import transformers


class Trainer(transformers.Trainer):
    """transformers', with the same arguments and methods.

    The norm of the gradients is logged only where they are clipped. Computing it reads all gradients
    before each step, so that no update could be deferred.

    Args:
        args: transformers'; with `max_grad_norm=0` nothing is clipped.
        options: keywords for `gradlane.attach`.
        kwargs: transformers'.
    """

    def __init__(self, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attach_options = dict(options or {})

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'."""
        with replaced_ddp(**self._attach_options):
            return super().train(*args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return None if grad_norm is None else super()._get_grad_norm(model, grad_norm=grad_norm)
