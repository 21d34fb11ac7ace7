"""ParameterReads: whether a script reads its parameters between a step and the next forward pass, as averages of weights do.

An update that is deferred would have to be made for it. So such a script waits for all sums after each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradlane.live.session.hooks import tensors_in
from gradlane.live.session.pending_gradient import METADATA

_MOST = 0.9  # part of the parameters' bytes: a script that reads fewer waits for those alone


class ParameterReads(TorchFunctionMode):
    """Sees which of some parameters the calls of torch's functions read, while it looks.

    Args:
        params: the parameters.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self._sizes = {id(param): param.nbytes for param in params}
        self._read: set[int] = set()
        self._looks = False

    def begin(self) -> None:
        """Look from now on, unless the script has a mode of its own, which it may leave in another order."""
        self._read.clear()
        if not torch._C._len_torch_function_stack():
            self._looks = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> bool:
        """Look no more. Returns whether most parameters were read."""
        if self._looks and torch.overrides._get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)
        self._looks = False  # below a mode of the script's it stays, and sees nothing
        return sum(map(self._sizes.__getitem__, self._read)) >= _MOST * sum(self._sizes.values())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._looks and func not in METADATA:
            self._read.update(id(tensor) for tensor in tensors_in((args, kwargs)) if id(tensor) in self._sizes)
        return func(*args, **kwargs)
