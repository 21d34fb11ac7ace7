"""Actions between steps: on parameters, buffers, optimizers, and copies of them."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from tests.live.programs.run import ACTIONS, Run, action

# -- looking -----------------------------------------------------------------------------------------------


@action
def see(run: Run, what: str) -> None:
    """model, optimizer, parameters, norms, gradients, vector, numpy, buffers."""
    if what == "model":
        run.see("state_dict", run.model.state_dict())
    elif what == "optimizer":
        run.see("optimizer's state_dict", [optimizer.state_dict()["state"] for optimizer in run.optimizers])
    elif what == "parameters":
        run.see("parameters", [param.detach().clone() for param in run.parameters()])
    elif what == "data":
        run.see("data", [param.data.sum() for param in run.parameters()])
    elif what == "norms":
        run.see("norms", [param.norm() for param in run.parameters()])
    elif what == "numpy":
        run.see("numpy", [param.detach().numpy().copy() for param in run.parameters()])
    elif what == "vector":
        run.see("vector", nn.utils.parameters_to_vector(run.parameters()))
    elif what == "gradients":
        run.see("gradients", [None if param.grad is None else param.grad.clone() for param in run.parameters()])
    else:
        run.see("buffers", dict(run.model.named_buffers()))


@action
def keep(run: Run, what: str) -> None:
    """Take references, to be looked at later: gradients, gradient_data, gradient_views, parameter_data, parameter_views, state
    or state_dict.
    """
    found = {
        "gradients": lambda: [param.grad for param in run.with_gradients()],
        "gradient_data": lambda: [param.grad.data for param in run.with_gradients()],
        "gradient_views": lambda: [param.grad[:1] for param in run.with_gradients() if param.grad.dim()],
        "parameter_data": lambda: [param.data for param in run.parameters()],
        "parameter_views": lambda: [param.detach()[:1] for param in run.parameters() if param.dim()],
        "parameter_numpy": lambda: [param.detach().numpy() for param in run.parameters()],
        "last": lambda: [getattr(optimizer, "last", []) for optimizer in run.optimizers],
        "state": lambda: [dict(state) for state in run.states()],
        "state_dict": lambda: [dict(run.model.state_dict())],
        "optimizer_state_dict": lambda: [optimizer.state_dict()["state"] for optimizer in run.optimizers],
    }[what]()
    run.kept.append((what, found))


@action
def look(run: Run) -> None:
    """At every reference that was taken, as it is now."""
    for what, references in run.kept:
        run.see(f"kept {what}", references)


# -- copies ------------------------------------------------------------------------------------------------


@action
def save(run: Run, what: str) -> None:
    """Through a file: state_dict, optimizer, module or pickle. What comes back is looked at."""
    file = io.BytesIO()
    if what == "pickle":
        loaded = pickle.loads(pickle.dumps(run.model)).state_dict()
    else:
        optimizer_states = [optimizer.state_dict() for optimizer in run.optimizers]
        torch.save({"state_dict": run.model.state_dict(), "optimizer": optimizer_states, "module": run.model}[what], file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded = loaded.state_dict() if what == "module" else loaded
    run.see(f"saved {what}", [one["state"] for one in loaded] if what == "optimizer" else loaded)


@action
def duplicate(run: Run, what: str) -> None:
    """A deep copy of the model (also cast to half precision), of model and optimizer together, or of the optimizers alone, and
    what is in it.
    """
    if what == "half":
        run.see("half", dict(copy.deepcopy(run.model).half().named_parameters()))
    elif what == "model":
        run.see("copy", dict(copy.deepcopy(run.model).named_parameters()))
    elif what == "both":
        model, optimizers = copy.deepcopy((run.model, run.optimizers))
        run.see("copy", dict(model.named_parameters()))
        run.see("copy", [list(optimizer.state.values()) for optimizer in optimizers])
    else:
        run.see("copy", [list(optimizer.state.values()) for optimizer in copy.deepcopy(run.optimizers)])


@action
def mark(run: Run) -> None:
    """The state to which `rollback` returns."""
    run.save()


@action
def rollback(run: Run, *what: str) -> None:
    """model and optimizer, in the order given, or one of them."""
    for one in what:
        if one == "model":
            run.model.load_state_dict(run.saved[0])
        else:
            for optimizer, state in zip(run.optimizers, run.saved[1], strict=True):
                if [len(group["params"]) for group in state["param_groups"]] == [
                    len(g["params"]) for g in optimizer.param_groups
                ]:
                    optimizer.load_state_dict(copy.deepcopy(state))


@action
def average(run: Run, how: str = "lerp") -> None:
    """An exponential moving average of the parameters."""
    for name, param in run.model.named_parameters():
        if how == "swa":
            break
        if name not in run.average:
            run.average[name] = param.detach().clone()
        elif how == "data":
            run.average[name].mul_(0.9).add_(param.data, alpha=0.1)
        elif how == "state_dict":
            run.average[name].lerp_(run.model.state_dict()[name], 0.1)
        else:
            run.average[name].lerp_(param.detach(), 0.1)
    if how == "swa":
        run.averaged = run.averaged or torch.optim.swa_utils.AveragedModel(run.model, use_buffers=True)
        run.averaged.update_parameters(run.model)
        run.see("average", dict(run.averaged.module.named_parameters()))


@action
def evaluate_average(run: Run, how: str) -> None:
    """The average takes the place of the parameters for an evaluation: by copy, or by exchanging `.data`."""
    if not run.average:
        return
    named = dict(run.model.named_parameters())
    before = {name: param.data.clone() if how == "copy" else param.data for name, param in named.items()}
    for name, param in named.items():
        if how == "copy":
            param.data.copy_(run.average[name])
        else:
            param.data = run.average[name]
    run.call.eval()
    with torch.no_grad():
        run.see("evaluation of the average", float(run.loss()))
    run.call.train()
    for name, param in named.items():
        if how == "copy":
            param.data.copy_(before[name])
        else:
            param.data = before[name]


# -- writing -----------------------------------------------------------------------------------------------


@action
def write(run: Run, how: str, which: str = "all") -> None:
    generator = torch.Generator(run.device).manual_seed(100 + run.steps)
    params = run.parameters(which)
    if how == "vector":  # torch takes only contiguous ones, and all get one dtype
        params = [param for param in params if param.is_contiguous() and param.dtype == params[0].dtype]
        vector = nn.utils.parameters_to_vector(params).detach() * 0.9
        nn.utils.vector_to_parameters(vector, params)
        return
    if how == "foreach":
        with torch.no_grad():
            torch._foreach_mul_(params, 0.9)
        return
    for param in params:
        if how == "data":
            param.data.clamp_(-0.2, 0.2)
        elif how == "new_data":
            param.data = param.data * 0.9
        elif how == "numpy":
            param.detach().numpy()[...] *= 0.9
        elif how == "init":
            nn.init.normal_(param, std=0.1, generator=generator)
        elif how == "load":
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        else:
            with torch.no_grad():
                if how == "mul":
                    param.mul_(0.9)
                elif how == "operator":
                    param *= 0.9
                elif how == "index":
                    param[:1] = 0.01
                elif how == "copy":
                    param.copy_(torch.full_like(param, 0.01))
                elif how == "out":
                    torch.mul(param, 0.9, out=param)
                else:
                    raise ValueError(how)


@action
def freeze(run: Run, which: str) -> None:
    for param in run.parameters(which):
        param.requires_grad = False


@action
def unfreeze(run: Run) -> None:
    run.model.requires_grad_(True)


@action
def cast(run: Run, dtype: str, through: str = "") -> None:
    """To another dtype and back, with an evaluation there, or without."""
    model = run.model
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    before = {name: value.dtype for name, value in named}
    getattr(run.model, dtype)()
    run.see("parameters in another dtype", [param.detach().clone() for param in run.parameters()])
    if through:
        run.call.eval()
        with torch.no_grad():
            run.see("evaluation in another dtype", float(run.loss()))
        run.call.train()
    for prefix, module in run.model.named_modules(remove_duplicate=False):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own:  # all of one dtype
            module.to(next((before[f"{prefix}.{name}".lstrip(".")] for name, value in own if value.is_floating_point()), None))


@action
def layout(run: Run, how: str) -> None:
    run.model.to(memory_format=getattr(torch, how))


@action
def buffer(run: Run, how: str) -> None:
    for value in run.model.buffers():
        if how == "data":
            value.data.copy_(value.data.to(torch.float64) * 0.5 + 1)
        elif how == "zero":
            value.zero_()
        elif value.dtype != torch.bool:
            value.add_(1)


# -- the optimizer -----------------------------------------------------------------------------------------


@action
def state(run: Run, how: str) -> None:
    """The optimizer's state by hand: read, clear, zero, scale, replace, pop (one parameter's)."""
    for optimizer in run.optimizers:
        if how == "read":
            run.see("state", run.states())
        elif how == "clear":
            optimizer.state.clear()
        elif how == "new":
            optimizer.state = type(optimizer.state)(dict)
        elif how == "pop":
            optimizer.state.pop(optimizer.param_groups[0]["params"][0], None)
        elif how == "replace":
            for state in optimizer.state.values():
                state.update({key: value * 0.5 for key, value in state.items() if _is_moment(key, value)})
        else:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if _is_moment(key, value):
                        value.mul_(0.0 if how == "zero" else 0.5)


def _is_moment(key: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and key != "step"


@action
def fetch_state(run: Run) -> None:
    """From the servers, if it is there."""
    run.fetch_state()


@action
def reattach(run: Run, *words: str) -> None:
    """Sessions are closed, another action is done where there is one, and all attach again."""
    with run.apart():
        if words:
            ACTIONS[words[0]](run, *words[1:])


@action
def rate(run: Run, factor: str) -> None:
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(float(factor))
            else:
                group["lr"] *= float(factor)


@action
def option(run: Run, name: str, value: str) -> None:
    """Another hyper-parameter is changed, where the optimizer has it."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            if name in group:
                group[name] = float(value)


@action
def add_group(run: Run) -> None:
    """What no optimizer has yet, if anything."""
    has = {id(param) for optimizer in run.optimizers for group in optimizer.param_groups for param in group["params"]}
    rest = [param for param in run.parameters() if id(param) not in has and param.requires_grad]
    if rest:
        run.optimizers[0].add_param_group({"params": rest, "lr": 0.02})


@action
def regroup(run: Run) -> None:
    """The parameters of the first group are handed over in the opposite order."""
    group = run.optimizers[0].param_groups[0]
    group["params"] = group["params"][::-1]


@action
def schedule(run: Run) -> None:
    for scheduler in run.schedulers:
        scheduler.step()
