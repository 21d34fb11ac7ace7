"""Hooks of the script's own, registered before or after gradlane gets the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.live.programs.run import Run


class ModuleHook:
    """A hook on a module, which is pickled along with it: what comes back does nothing."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __reduce__(self) -> Any:
        return type(self), ()


HOOKS: dict[str, Callable[..., None]] = {}


def hook(function: Callable[..., None]) -> Callable[..., None]:
    HOOKS[function.__name__] = function
    return function


def register(run: Run, line: str) -> None:
    _, name, *words = line.split()
    HOOKS[name](run, *words)


def _before_step(run: Run, what: str) -> Callable[..., None]:
    def before(*_: Any) -> None:
        if what == "clip":
            nn.utils.clip_grad_norm_(run.parameters(), 0.1)
        elif what == "scale":
            for param in run.with_gradients():
                param.grad.mul_(0.7)
        elif what == "replace":
            for param in run.with_gradients():
                param.grad = param.grad * 0.7
        elif what == "decay":
            with torch.no_grad():
                for param in run.parameters():
                    param.mul_(0.99)
        elif what == "keep":
            run.kept.append(("gradients before the step", [param.grad for param in run.with_gradients()]))
        elif what == "rate":
            for group in run.optimizers[0].param_groups:
                group["weight_decay"] = 0.01 * (run.steps % 3)
        else:
            run.see("norms before the step", [param.grad.norm() for param in run.with_gradients()])

    return before


@hook
def step_pre(run: Run, what: str) -> None:
    run.handles += [optimizer.register_step_pre_hook(_before_step(run, what)) for optimizer in run.optimizers]


@hook
def unbound_step_pre(run: Run, what: str) -> None:
    """By the class's own function, past whatever stands on the object."""
    register_hook = torch.optim.Optimizer.register_step_pre_hook
    run.handles += [register_hook(optimizer, _before_step(run, what)) for optimizer in run.optimizers]


@hook
def global_step_pre(run: Run, what: str) -> None:
    """For the steps of all optimizers of the process."""
    before, own = _before_step(run, what), run.optimizers

    def for_own(optimizer: Any, *_: Any) -> None:
        if any(optimizer is each for each in own):
            before()

    run.handles.append(register_optimizer_step_pre_hook(for_own))


@hook
def step_post(run: Run, what: str) -> None:
    def after(*_: Any) -> None:
        with torch.no_grad():
            if what == "clamp":
                for param in run.parameters():
                    param.clamp_(-0.3, 0.3)
            elif what == "renorm":
                weight = run.parameters()[-1]
                weight.data = weight.data / (weight.data.norm() + 0.1)
            elif what == "average":
                for name, param in run.model.named_parameters():
                    run.average[name] = param.detach().clone().lerp_(run.average.get(name, param), 0.9)
            elif what == "count":
                run.see("steps", len(run.seen))
            elif what == "see":
                run.see("parameters after the step", [param.sum() for param in run.parameters()])
            elif what == "gradients":
                run.see("gradients after the step", [param.grad.sum() for param in run.with_gradients()])
            elif what == "state":
                run.see("state after the step", run.states())
            else:
                run.optimizers[0].zero_grad()

    run.handles += [optimizer.register_step_post_hook(after) for optimizer in run.optimizers]


@hook
def gradient(run: Run, what: str) -> None:
    """On each parameter's gradient, before it is accumulated."""

    def changed(value: torch.Tensor) -> torch.Tensor | None:
        if what == "scale":
            return value * 1.2
        run.see("gradient", value.sum())
        return None

    run.handles += [param.register_hook(changed) for param in run.parameters() if param.requires_grad]


@hook
def accumulated(run: Run, what: str) -> None:
    """On each parameter, when its gradient has been accumulated."""

    def after(param: torch.Tensor) -> None:
        assert param.grad is not None
        if what == "scale":
            param.grad.mul_(1.2)
        elif what == "replace":
            param.grad = param.grad * 1.2
        elif what == "see":
            run.see("accumulated", param.grad.sum())

    run.handles += [param.register_post_accumulate_grad_hook(after) for param in run.parameters() if param.requires_grad]


@hook
def forward_pre(run: Run, what: str) -> None:
    """On the whole model; by DDP's side, of the module inside the wrapper."""

    def before(*_: Any) -> None:
        with torch.no_grad():
            if what == "clamp":
                for param in run.parameters():
                    param.clamp_(-0.3, 0.3)
            elif what == "data":
                for param in run.parameters():
                    param.data.mul_(0.999)
            else:
                run.see("norms before the forward pass", [param.norm() for param in run.parameters()])

    run.handles.append(run.model.register_forward_pre_hook(ModuleHook(before)))


@hook
def child_pre(run: Run, what: str) -> None:
    """On each layer: what it changes are its own parameters."""

    def before(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                if what == "clamp":
                    param.clamp_(-0.3, 0.3)
                elif what == "data":
                    param.data.mul_(0.999)
                else:
                    run.see("norm before a layer", param.norm())

    for module in run.model.modules():
        if not isinstance(module, torch.jit.ScriptModule) and module is not run.model:
            run.handles.append(module.register_forward_pre_hook(ModuleHook(before)))


@hook
def forward_post(run: Run, what: str) -> None:
    """On the whole model, when it has computed its output."""

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        if what == "scale" and isinstance(output, torch.Tensor):
            return output * 1.1
        with torch.no_grad():
            if what == "clamp":
                for buffer in module.buffers():
                    if buffer.is_floating_point():
                        buffer.clamp_(-0.3, 0.3)
            elif what == "see":
                run.see("output", output)
        return None

    run.handles.append(run.model.register_forward_hook(ModuleHook(after)))


@hook
def several_gradients(run: Run, what: str) -> None:
    """One hook on the gradients of several parameters, before they are accumulated."""

    def after(gradients: Any) -> None:
        run.see("gradients", [None if value is None else value.sum() for value in gradients])

    some = [param for param in run.parameters() if param.requires_grad]
    run.handles.append(torch.autograd.graph.register_multi_grad_hook(some, after))


@hook
def node(run: Run, what: str) -> None:
    """On the nodes that accumulate gradients, ahead of that."""

    def before(gradients: Any) -> Any:
        if what == "scale":
            return tuple(value * 1.2 for value in gradients)
        run.see("gradient of a node", [value.sum() for value in gradients])
        return None

    for param in run.parameters():
        if param.requires_grad:
            accumulates = param.view_as(param).grad_fn.next_functions[0][0]
            run.nodes.append(accumulates)
            run.handles.append(accumulates.register_prehook(before))


@hook
def backward_pre(run: Run, what: str) -> None:
    """On the whole model, before its backward pass."""

    def before(module: nn.Module, slopes: Any) -> Any:
        if what == "scale":
            return tuple(None if slope is None else slope * 1.1 for slope in slopes)
        run.see("slope before", slopes)
        return None

    run.handles.append(run.model.register_full_backward_pre_hook(ModuleHook(before)))


@hook
def backward_post(run: Run, what: str) -> None:
    """A full backward hook on the whole model: it wraps its output."""

    def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
        run.see("slope", outputs)

    run.handles.append(run.model.register_full_backward_hook(ModuleHook(after)))


@hook
def scheduler(run: Run, what: str) -> None:
    """step, cycle (which changes the momentum too) or warmup."""
    for optimizer in run.optimizers:
        if what == "step":
            made: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
        elif what == "cycle":
            made = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3, cycle_momentum="momentum" in optimizer.defaults)
        else:
            made = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        run.schedulers.append(made)
