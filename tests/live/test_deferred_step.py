"""DeferredStep: parameters updated one by one, with the bits of one call of `step()`."""

from __future__ import annotations

import functools

import pytest
import torch

from gradlane.live.session.deferred_step import PER_PARAMETER, DeferredStep

pytestmark = pytest.mark.matrix


def _params() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4) * (place + 1)) for place in range(3)]
    for param in params:
        param.grad = param.detach().sin()
    return params


@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in PER_PARAMETER))
def test_updates_one_by_one_have_the_bits_of_the_whole_step(name):
    whole, parts = _params(), _params()
    once, deferred = getattr(torch.optim, name)(whole, lr=0.1), getattr(torch.optim, name)(parts, lr=0.1)
    for _ in range(3):
        once.step()
        step = DeferredStep(deferred)
        for param in reversed(parts):
            step.update([param])
    for expected, got in zip(whole, parts, strict=True):
        assert torch.equal(expected, got)
        assert got.requires_grad
        assert got.is_leaf


def test_what_a_script_puts_around_an_optimizers_step_runs_with_each_update():
    calls = []

    class Counted(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure=None):
            calls.append([group["params"] for group in self.param_groups])
            return super().step(closure)

    params = _params()
    step = DeferredStep(Counted(params, lr=0.1))
    for param in params:
        step.update([param])
    assert calls == [[[param]] for param in params]


@pytest.mark.parametrize("enabled", [True, False])
def test_an_update_leaves_the_grad_mode_as_it_was(enabled):
    params = _params()
    with torch.set_grad_enabled(enabled):
        DeferredStep(torch.optim.SGD(params, lr=0.1)).update(params)
        assert torch.is_grad_enabled() == enabled
