"""Actions on the structure of a model: masks, functions over all modules, and other forms of the same model."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.nn.utils import prune as pruning

from tests.live.programs.run import Run, action


def _layers(run: Run) -> list[nn.Linear]:
    """Linear layers whose weight is their own."""
    weights = [module.weight for module in run.model.modules() if isinstance(module, nn.Linear)]
    return [
        module
        for module in run.model.modules()
        if type(module) is nn.Linear and sum(weight is module.weight for weight in weights) == 1
    ]


@action
def prune(run: Run, how: str) -> None:
    """From now on the weight of the first linear layer is masked, or no more. The parameter stays the one that the optimizer
    has. (DDP sums no more where a parametrization is registered: that gives the parameter other memory.)
    """
    layers = _layers(run)
    if not layers:
        return
    if how == "mask" and not pruning.is_pruned(layers[0]):
        pruning.l1_unstructured(layers[0], "weight", amount=0.3)
    elif how == "remove" and pruning.is_pruned(layers[0]):
        pruning.remove(layers[0], "weight")


@action
def apply(run: Run, how: str) -> None:
    """A function is applied to all modules, or to all tensors of the model, or the model goes where it is."""
    found: list[torch.Tensor] = []
    if how == "modules":
        run.model.apply(lambda module: found.extend(param.norm() for param in module.parameters(recurse=False)))
    elif how == "tensors":

        def noted(value: torch.Tensor) -> torch.Tensor:
            found.append(value.detach().double().sum())
            return value

        run.model._apply(noted)
    elif how == "to":
        run.model.to(run.device)
    elif how == "shared":
        run.model.share_memory()
    else:
        for module in run.model.modules():
            for name, value in module.named_buffers(recurse=False):
                module.register_buffer(name, value.clone(), name not in module._non_persistent_buffers_set)
    run.see("applied", found)


@action
def represent(run: Run, how: str) -> None:
    """Another form of the same model computes its output, or has its parameters: traced, called with its own state, a shallow
    copy, loaded into a new one, stacked with a copy, or with BatchNorm folded into convolutions.
    """
    x, _ = run.batch()
    was = {module: module.training for module in run.model.modules()}
    run.take()
    run.model.eval()
    with torch.no_grad():
        if how == "trace":
            traced = torch.jit.trace(run.model, (x,), check_trace=False, strict=False)
            run.see("traced", traced(x))
        elif how == "functional":
            state = {**dict(run.model.named_parameters()), **dict(run.model.named_buffers())}
            run.see("functional", torch.func.functional_call(run.model, state, (x,)))
        elif how == "shallow":
            run.see("shallow", copy.copy(run.model)(x))
        elif how == "loaded":
            loaded = copy.deepcopy(run.model).requires_grad_(False)
            for param in loaded.parameters():
                param.zero_()
            loaded.load_state_dict(run.model.state_dict())
            run.see("loaded", loaded(x))
        elif how == "stacked":
            run.see("stacked", torch.func.stack_module_state([run.model, copy.deepcopy(run.model)]))
        elif how == "fused":
            features = getattr(run.model, "features", None)
            if features is not None:
                run.see("fused", nn.utils.fuse_conv_bn_eval(features[0], features[1])(x))
    for module, training in was.items():
        module.training = training


@action
def distributed_state(run: Run, how: str) -> None:
    """By torch.distributed.checkpoint: the state is got, or set to what it was at the last mark."""
    full = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)
    if how == "get":
        run.see("model's state", distributed.get_model_state_dict(run.model))
    elif how == "full":
        run.see("full state", distributed.get_model_state_dict(run.model, options=full))
    elif how == "set":
        distributed.set_model_state_dict(run.model, copy.deepcopy(run.saved[0]))
    else:
        state = distributed.get_optimizer_state_dict(run.model, run.optimizers)["state"]
        run.see("optimizers' state", state)
