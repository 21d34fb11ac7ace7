"""Names: what torch.distributed asks a process group for by name, newer releases from C++ and older ones from Python.
Without these methods it would ask for a backend within the group, and there is none.
"""

from __future__ import annotations

from typing import Any

import torch


class Names:
    """Name, description and backend of a process group, as torch.distributed sets them and asks for them."""

    _name = _description = ""
    supports_splitting = False

    def getBackendName(self) -> str:
        return "gradlane"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    _set_group_name, group_name = setGroupName, property(getGroupName)
    _set_group_desc, group_desc = setGroupDesc, property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """The group itself, which has no other backend."""
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self
