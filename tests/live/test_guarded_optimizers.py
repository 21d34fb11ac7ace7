"""Optimizers whose state is not up to date, or lost: of torch's layout, and of others."""

from __future__ import annotations

from abc import ABC
from typing import Any

import pytest
import torch
from torch import nn

from gradlane.errors import JobError
from gradlane.live.session import guarded_states, outdated


class WithBases(ABC, torch.optim.SGD):
    """Python lays out its objects otherwise than those of SGD."""


class WithAttributes(torch.optim.SGD):
    """Has its own way of attributes."""

    def __getattribute__(self, name: str) -> Any:
        return "by its own way" if name == "described" else super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value if name != "doubled" else 2 * value)


KINDS = [torch.optim.SGD, WithBases, WithAttributes]


def made(kind: type[torch.optim.SGD]) -> torch.optim.Optimizer:
    layer = nn.Linear(2, 2)
    optimizer = kind(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


def check_own_attributes(optimizer: Any, kind: type) -> None:
    assert type(optimizer).__name__ == kind.__name__
    assert optimizer.param_groups[0]["lr"] == 0.1
    if kind is WithAttributes:
        optimizer.doubled = 3
        assert (optimizer.described, optimizer.doubled) == ("by its own way", 6)


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_is_owed_updates_is_settled_before_it_is_read(kind):
    optimizer, settled = made(kind), []
    guarded_states.watch(optimizer, settled, lambda: settled.append("settled"))
    check_own_attributes(optimizer, kind)
    assert settled == []
    assert guarded_states.own_class(optimizer) is kind
    assert len(optimizer.state) == 2
    assert settled == ["settled"]
    assert type(optimizer) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_is_lost_is_refused_until_another_is_loaded(kind):
    optimizer, saved = made(kind), made(kind).state_dict()
    outdated.refuse_state(optimizer, "by the test")
    check_own_attributes(optimizer, kind)
    with pytest.raises(JobError, match="by the test"):
        optimizer.state  # noqa: B018
    with pytest.raises(JobError, match="by the test"):
        optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert type(optimizer) is kind
    assert len(optimizer.state) == 2
