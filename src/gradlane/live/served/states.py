"""States: what torch.optim keeps for a parameter, as the parts that a server keeps, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradlane.transport import Part

PARTS_OF_STATE: tuple[Part, ...] = ("first", "second", "steps")
_FIRST = ("momentum_buffer", "exp_avg")
_SECOND = ("exp_avg_sq",)


def part_of(state: Mapping[str, Any], part: Part, like: torch.Tensor) -> torch.Tensor:
    """`part` of a parameter's state, which may be empty; of the shape of `like`."""
    if part == "steps":
        # of SGD torch keeps no count: what matters is whether there is a momentum yet
        steps = state.get("step", 1.0 if state.get("momentum_buffer") is not None else 0.0)
        return torch.full_like(like, float(steps))
    found = [state[name] for name in (_FIRST if part == "first" else _SECOND) if state.get(name) is not None]
    return found[0] if found else torch.zeros_like(like)


def state_of(parts: Mapping[Part, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A parameter's state as torch.optim keeps it; empty before its first update."""
    steps = float(parts["steps"].reshape(-1)[0])
    if steps == 0 or "first" not in parts:
        return {}
    if "second" not in parts:
        return {"momentum_buffer": parts["first"]}
    return {"step": torch.tensor(steps, dtype=torch.float32), "exp_avg": parts["first"], "exp_avg_sq": parts["second"]}
