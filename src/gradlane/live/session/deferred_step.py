"""Deferred updates: the user's own optimizer, stepped for a few parameters at a time, later.

A shallow copy of the optimizer whose groups hold only some parameters, and which shares the state of the
original, updates those bit for bit as the whole would, provided that each update depends on nothing but its
parameter's own gradient and state. The hyper-parameters are those of the moment of `step()`, since an LR
scheduler changes them before a deferred update runs.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

# Each updates a parameter from its own gradient and state alone. LBFGS and whatever takes a norm over all
# parameters does not; an optimizer that is not here waits for all gradients.
PER_PARAMETER: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
        "Adafactor", "Muon",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip


def why_it_needs_the_barrier(optimizer: torch.optim.Optimizer) -> str | None:
    """None if updates of `optimizer` may be deferred, else the reason why not."""
    if type(optimizer) in PER_PARAMETER:
        return None
    return (
        f"{type(optimizer).__name__} is not known to update each parameter from its own gradient alone; pass "
        "cross_barrier=True to gradlane.attach if it does"
    )


def keeps_no_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` is known to leave no reference to `param.grad` behind, whose memory the next sum will use."""
    return isinstance(optimizer, tuple(PER_PARAMETER))


@contextlib.contextmanager
def as_at_step() -> Iterator[None]:
    """Leave whatever the first use of a parameter is inside of: a trace, functorch's levels, dispatch and function modes."""
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._len_torch_function_stack():
            stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        trace = torch._C._get_tracing_state()
        if trace is not None:
            torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
            stack.callback(torch._C._set_tracing_state, trace)  # type: ignore[attr-defined]
        yield


class DeferredStep:
    """What one call of `optimizer.step()` still owes: parameters, and hyper-parameters as they were then."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.owes = 0  # updates
        self._entries = len(optimizer.state)
        self._class = type(optimizer)  # which changes while updates are owed, see `pending.py`
        self._groups = [
            {key: _snapshot(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._group_of = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}

    def update(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Step `params`, whose `.grad` must be in place, under the hyper-parameters of the call."""
        members: dict[int, list[torch.nn.Parameter]] = {}
        for param in params:
            members.setdefault(self._group_of[id(param)], []).append(param)
        self._step(members)

    def ended(self) -> None:
        """Nothing is owed any more: entries that this step made in the optimizer's state come in the order of its parameters,
        as if `step()` had made them, and not in the order in which gradients arrived."""
        state = self.optimizer.state
        if len(state) > self._entries:
            places = {param: place for place, param in enumerate(self._group_of)}
            made = list(state)[self._entries :]
            for param in sorted(made, key=lambda param: places.get(id(param), len(places))):
                state[param] = state.pop(param)

    def update_copies(self, copies: Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter, dict[str, torch.Tensor]]]) -> None:
        """For each (parameter, copy, state) step the copy as `update` would step the parameter; its state changes too."""
        members: dict[int, list[torch.nn.Parameter]] = {}
        states: defaultdict[torch.nn.Parameter, dict[str, torch.Tensor]] = defaultdict(dict)
        for param, copied, state in copies:
            members.setdefault(self._group_of[id(param)], []).append(copied)
            states[copied] = state
        self._step(members, state=states)

    def _step(self, members: dict[int, list[torch.nn.Parameter]], **instead: Any) -> None:
        part = object.__new__(self._class)
        part.__dict__ = {**self.optimizer.__dict__, **instead}
        part.__dict__.pop("step", None)  # an LR scheduler's counting wrapper
        part.param_groups = [{**self._groups[index], "params": params} for index, params in sorted(members.items())]
        part._optimizer_step_pre_hooks = OrderedDict()
        part._optimizer_step_post_hooks = OrderedDict()
        # past the wrapper that records the call and runs hooks: they ran at step()
        step: Any = type(part).step
        device = next(iter(members.values()))[0].device.type
        # a deferred update runs wherever its parameter is first used: autocast and inference_mode there must not reach it
        with torch.inference_mode(False), torch.autocast(device, enabled=False):
            getattr(step, "__wrapped__", step)(part)


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()  # a tensor learning rate is changed in place
    return copy.copy(value) if isinstance(value, (list, dict)) else value
