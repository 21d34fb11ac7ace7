"""BufferPlaces: where the buffers of a model are, and whether they are still there."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

_Place = tuple[dict[str, "torch.Tensor | None"], str]
"""Of a buffer: a module's dictionary of buffers, and the key in it."""


class BufferPlaces:
    """Where the buffers of a model are, each once.

    Args:
        model: whose buffers are kept equal to rank 0's.
        ignored: full names of those that are not.

    Attributes:
        names, owners: full names of the buffers and their places, as they were at first.
    """

    def __init__(self, model: torch.nn.Module, ignored: Container[str] = ()) -> None:
        self._model, self._ignored = model, ignored
        self._changed: str | None = None
        self._modules, self._places = self._look()
        self.names, self.owners = list(self._places), list(self._places.values())

    def _look(self) -> tuple[list[tuple[Any, ...]], dict[str, _Place]]:
        modules: list[tuple[Any, ...]] = []
        places: dict[str, _Place] = {}
        seen = set()
        for prefix, module in self._model.named_modules():
            modules.append((module._modules, tuple(module._modules.values()), module._buffers, _present(module._buffers)))
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    if name not in self._ignored:
                        places[name] = module._buffers, key
        return modules, places

    @property
    def changed(self) -> str | None:
        """The name of a buffer that is not where it was, or the first name where one is gone; None if all are as they were."""
        if self._changed is None and not all(
            tuple(parts.values()) == parts_before and (not (buffers or present) or _present(buffers) == present)
            for parts, parts_before, buffers, present in self._modules
        ):
            before = self._places
            self._modules, self._places = self._look()
            names = (name for name in (*self._places, *before) if _owner(self._places, name) is not _owner(before, name))
            self._changed = next(names, None)  # None where the modules that changed have no buffers
        return self._changed


def _owner(places: dict[str, _Place], name: str) -> object:
    return places[name][0] if name in places else None


def _present(buffers: dict[str, torch.Tensor | None]) -> tuple[str, ...]:
    return tuple(name for name, buffer in buffers.items() if buffer is not None)
