"""Whether a script is seen to read its parameters after a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradlane.live.ddp.parameter_reads import ParameterReads

Step = Callable[[nn.Module, torch.optim.Optimizer], object]


def _averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    averages = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for average, param in zip(averages, model.parameters(), strict=True):
            average.lerp_(param, 0.01)


def _of_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch._foreach_mul([param.data for param in model.parameters()], 0.5)


def _dropped(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


READS: dict[str, Step] = {
    "an average": _averaged,
    "an average of data": _of_data,
    "torch's average": lambda model, optimizer: torch.optim.swa_utils.AveragedModel(model).update_parameters(model),
    "a state_dict": lambda model, optimizer: model.state_dict(),
    "an evaluation": lambda model, optimizer: model(torch.randn(2, 8)),
}
OTHERS: dict[str, Step] = {
    "nothing": lambda model, optimizer: None,
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zero_grad to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "zero_grad by hand": lambda model, optimizer: _dropped(model),
    "sizes": lambda model, optimizer: sum(param.numel() for param in model.parameters() if param.requires_grad),
    "norms of gradients": lambda model, optimizer: nn.utils.get_total_norm([param.grad for param in model.parameters()]),
    "one weight": lambda model, optimizer: model[1].bias.sum().item(),
    "another learning rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.05),
    "a checkpoint of the optimizer": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize(("step", "reads"), [*((each, True) for each in READS), *((each, False) for each in OTHERS)])
def test_a_script_that_reads_most_of_its_parameters_is_seen(step, reads):
    model = nn.Sequential(nn.Linear(8, 30), nn.Linear(30, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    looks = ParameterReads(model.parameters())
    for _ in range(2):
        looks.begin()
        (READS | OTHERS)[step](model, optimizer)
        assert looks.end() == reads
        assert torch._C._len_torch_function_stack() == 0


class _Own(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_the_script_end_as_they_began_in_any_order():
    model = nn.Linear(8, 8)
    looks = ParameterReads(model.parameters())
    with _Own():  # begins before the step, and ends before the next forward pass
        looks.begin()
        model.state_dict()
    assert not looks.end()
    assert torch._C._len_torch_function_stack() == 0
    with contextlib.ExitStack() as stack:  # begins after the step, and ends after the next forward pass
        looks.begin()
        stack.enter_context(_Own())
        model.state_dict()
        assert looks.end()
        model(torch.randn(2, 8))
    with torch.device("meta"):
        assert torch.empty(1).is_meta
    assert not torch.empty(1).is_meta
