"""Closures of `step`: which optimizers may have them run before."""

from __future__ import annotations

import pytest
import torch

from gradlane.live.session.closures import run_first
from gradlane.live.session.deferred_step import PER_PARAMETER

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in PER_PARAMETER))
def test_an_optimizer_runs_its_closure_once_before_all_else_and_returns_what_it_returned(name):
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(torch.optim, name)([param], lr=0.1)
    at_first = len(optimizer.state)  # Adagrad makes its state when it is made
    seen = []

    def closure() -> str:
        assert torch.is_grad_enabled()
        seen.append((param.detach().clone(), len(optimizer.state)))
        param.grad = torch.full((4, 4), 0.5)
        return "loss"

    assert optimizer.step(closure) == "loss"
    ((before, states),) = seen
    assert torch.equal(before, torch.ones(4, 4))
    assert states == at_first
    assert not torch.equal(param, before)


def test_a_closure_of_an_optimizer_that_runs_it_several_times_is_left_to_it():
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])
    assert run_first(optimizer, (optimizer, lambda: pytest.fail("it was run")), {}) is None
