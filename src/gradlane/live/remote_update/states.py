"""States: converts the state that torch.optim keeps for a parameter to the parts that a server
keeps, and back.

    torch.optim                 server
    momentum_buffer (SGD)       first
    exp_avg (Adam, AdamW)       first
    exp_avg_sq (Adam, AdamW)    second
    step                        steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradlane.live.remote_update.values import Values
from gradlane.transport import Part

_PARTS: tuple[Part, ...] = ("first", "second", "steps")
_FIRST = ("momentum_buffer", "exp_avg")
_SECOND = ("exp_avg_sq",)


def place_states(states: Sequence[Mapping[str, Any]], params: Sequence[torch.Tensor], values: Values) -> None:
    """Write rank 0's `states`, one for each of `params`, to the servers. Every rank calls it;
    raises as `Values`.
    """
    for part in _PARTS:
        values.place(part, [_part_of(state, part, param.detach()) for state, param in zip(states, params, strict=True)])
    values.meet("all ranks' servers to have the optimizer's state")


def fetched_states(values: Values) -> list[dict[str, torch.Tensor]]:
    """Read the servers' state of each parameter, as torch.optim keeps it; empty before the first
    update.
    """
    parts: list[dict[Part, torch.Tensor]] = [{} for _ in values.slots]
    for part in _PARTS:
        for tensor, value in values.fetch(part).items():
            parts[tensor][part] = value
    return [_state_of(found) for found in parts]


class KnownStates:
    """The optimizer's state of each parameter as it is now, to find out whether the script changes it afterwards."""

    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._known = [
            {key: (value, value._version) for key, value in state.items() if isinstance(value, torch.Tensor)}
            for state in states
        ]

    def changed(self, states: Sequence[Mapping[str, Any]]) -> int | None:
        """The first place at which `states` are not what they were; None if there is none."""
        for place, (known, state) in enumerate(zip(self._known, states, strict=True)):
            now = {key for key, value in state.items() if isinstance(value, torch.Tensor)}
            if now != known.keys() or any(
                state[key] is not value or value._version != seen for key, (value, seen) in known.items()
            ):
                return place
        return None


def _part_of(state: Mapping[str, Any], part: Part, like: torch.Tensor) -> torch.Tensor:
    if part == "steps":
        # torch's SGD counts no steps, and servers only need to know whether there is a momentum yet
        steps = state.get("step", 1.0 if state.get("momentum_buffer") is not None else 0.0)
        return torch.full_like(like, float(steps))
    found = [state[name] for name in (_FIRST if part == "first" else _SECOND) if state.get(name) is not None]
    return found[0] if found else torch.zeros_like(like)


def _state_of(parts: Mapping[Part, torch.Tensor]) -> dict[str, torch.Tensor]:
    steps = float(parts["steps"].reshape(-1)[0])
    if steps == 0 or "first" not in parts:
        return {}
    if "second" not in parts:
        return {"momentum_buffer": parts["first"]}
    return {"step": torch.tensor(steps, dtype=torch.float32), "exp_avg": parts["first"], "exp_avg_sq": parts["second"]}
