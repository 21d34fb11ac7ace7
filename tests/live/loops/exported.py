"""Models and parameters that are traced, scripted, exported, compiled, quantised, or handed to torch.func between steps."""

from __future__ import annotations

import copy
import functools
import io
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from tests.live.loops.job import HELD, PROBE, STEPS, Job, Mlp, after_steps, loop
from tests.live.unasked import UNASKED


class Plain(nn.Sequential):
    """The layers of `Mlp` as a model that can be scripted."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 6))

    batch = staticmethod(Mlp.batch)


# -- traced, scripted, exported, compiled ------------------------------------------------------------------------


@loop(defers=None)
def the_model_traced(job: Job) -> None:
    after_steps(job, lambda: torch.jit.trace(job.model, PROBE, check_trace=False)(PROBE))


@loop(defers=None)
def a_copy_traced(job: Job) -> None:
    after_steps(job, lambda: torch.jit.trace(copy.deepcopy(job.model), PROBE)(PROBE))


@loop(defers=None, says=HELD)
def a_traced_layer_kept_and_called(job: Job) -> None:
    job.step()
    with torch.no_grad():
        traced = torch.jit.trace(job.model.layers[0], PROBE)
    for _ in range(STEPS):
        job.step()
        with torch.no_grad():
            job.see("of the traced layer", traced(PROBE))


@loop(defers=None, says=HELD)
def a_traced_model_kept_and_called(job: Job) -> None:
    job.step()
    with torch.no_grad():
        traced = torch.jit.trace(job.model, PROBE, check_trace=False)
    for _ in range(STEPS):
        job.step()
        with torch.no_grad():
            job.see("of the traced model", traced(PROBE))


@loop(defers=None, says=HELD)
def a_layer_scripted_and_called(job: Job) -> None:
    job.step()
    scripted = torch.jit.script(job.model.layers[1])
    for _ in range(STEPS):
        job.step()
        with torch.no_grad():
            job.see("of the scripted layer", scripted(torch.ones(2, 40)))


_SCRIPT = """
def layer(x, weight, bias):
    return torch.tanh(torch.nn.functional.linear(x, weight, bias))
"""


class OfScripted(Mlp):
    """Hands parameters to a scripted function, and reads them by torch's functions afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.CompilationUnit(_SCRIPT).layer  # of its own: what is fused depends on earlier calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = self.scripted(x, layer.weight, layer.bias)
        return self.layers[-1](x) + 1e-3 * sum(param.square().sum() for param in self.parameters())


@loop(model=OfScripted)
def a_scripted_function_of_parameters_in_the_forward_pass(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(defers=None)
def a_scripted_function_of_parameters_between_steps(job: Job) -> None:
    layer, scripted = job.model.layers[0], torch.jit.CompilationUnit(_SCRIPT).layer
    after_steps(job, lambda: scripted(PROBE, weight=layer.weight, bias=layer.bias))


@loop(defers=None)
def copies_by_functions_that_torch_does_not_overload(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        first, second, *rest = job.model.parameters()
        with warnings.catch_warnings(action="ignore"):  # torch advises against the first two
            job.see("by tensor", torch.tensor(first))
            job.see("by new_tensor", PROBE.new_tensor(data=second))
        job.see("by as_tensor", torch.as_tensor(rest[0], dtype=torch.float64))
        job.see("by asarray", torch.asarray(rest[1].requires_grad_(False), copy=True))
        rest[1].requires_grad_()
        job.see("by Parameter", nn.Parameter(rest[2]).detach().clone())
        job.see("by new", PROBE.new(rest[3]).clone())


@loop(defers=None, says=None)
def parameters_read_past_torchs_functions(job: Job) -> None:
    """Each read makes deferred updates. So each way comes first in some step, while there are any."""
    params, ways = list(job.model.parameters()), list(UNASKED.items())
    for step in range(STEPS + 3):
        job.step()
        for place in range(len(ways)):
            way, read = ways[(place + 2 * step) % len(ways)]
            job.see(way, read(params[(place + step) % len(params)]))


@loop(defers=False, says=None)
def gradients_read_past_torchs_functions(job: Job) -> None:
    params = list(job.model.parameters())
    ways = [each for each in UNASKED.items() if each[0] != "as_subclass"]  # torch refuses it
    for step in range(STEPS + 3):
        job.optimizer.zero_grad()
        job.backward()
        for place, (way, read) in enumerate(ways):
            job.see(way, read(params[(place + step) % len(params)].grad))
        job.optimizer.step()


class Scaled(Mlp):
    """Multiplies by a copy of one of its parameters, which it makes before anything else uses that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings(action="ignore"):
            scale = 1 + torch.tensor(self.layers[-1].bias)
        return super().forward(x) * scale


@loop(model=Scaled)
def a_copy_of_a_parameter_in_the_forward_pass(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=Plain, defers=None)
def the_model_scripted_in_the_end(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(job.model), file)
    file.seek(0)
    with torch.no_grad():
        job.see("of the scripted model", torch.jit.load(file)(PROBE))


@loop(model=Plain, defers=None)
def a_copy_scripted(job: Job) -> None:
    after_steps(job, lambda: torch.jit.script(copy.deepcopy(job.model))(PROBE))


@loop(defers=None, says="")
def the_model_exported(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step in (4, STEPS - 1):
            exported = torch.export.export(job.model, (PROBE,))
            job.see("exported", dict(exported.state_dict))
            with torch.no_grad():
                job.see("of the exported model", exported.module()(PROBE))


@loop(defers=None, says="")
def the_model_exported_by_the_compiler(job: Job) -> None:
    torch.compiler.reset()
    for step in range(STEPS):
        job.step()
        if step in (4, STEPS - 1):
            with torch.no_grad():
                job.see("of the exported model", torch.export.export(job.model, (PROBE,), strict=True).module()(PROBE))


@loop(defers=None)
def a_copy_exported(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step in (4, STEPS - 1):
            with torch.no_grad():
                job.see("exported", torch.export.export(copy.deepcopy(job.model), (PROBE,)).module()(PROBE))


@loop(defers=None)
def a_norm_by_a_compiled_function(job: Job) -> None:
    torch.compiler.reset()
    norm = torch.compile(lambda params: sum(param.detach().square().sum() for param in params), backend="eager")
    for step in range(STEPS):
        job.step()
        if step >= 4:
            job.see("norm", norm(list(job.model.parameters())))


# -- quantised -------------------------------------------------------------------------------------------------


class Quantised(Mlp):
    """Weights are rounded to eight bits in forward, and gradients go through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            scale = float(layer.weight.detach().abs().max()) / 127
            weight = torch.fake_quantize_per_tensor_affine(layer.weight, scale, 0, -128, 127)
            x = torch.tanh(F.linear(x, weight, layer.bias))
        return x


@loop(model=Quantised)
def weights_rounded_in_forward(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


def _prepared() -> nn.Module:
    model = Mlp()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(model.train())


@loop(model=_prepared, ddp={"find_unused_parameters": True}, defers=None)
def quantisation_aware_training(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
    quantised = torch.ao.quantization.convert(copy.deepcopy(job.model).eval())
    job.see("quantised", torch.cat([layer.weight().dequantize().flatten() for layer in quantised.layers]))


# -- torch.func ------------------------------------------------------------------------------------------------


def _loss_of_one(model: nn.Module, params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.func.functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))


@loop(defers=None, says=HELD)
def gradients_of_each_example_by_vmap(job: Job) -> None:
    plain = Mlp()
    for _ in range(STEPS):
        job.step()
        x, y = job.batch()
        params = {name: param.detach() for name, param in job.model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(functools.partial(_loss_of_one, plain)), in_dims=(None, 0, 0))
        job.see("gradients", each(params, x, y))


@loop(defers=None)
def gradients_of_the_parameters_by_func(job: Job) -> None:
    plain = Mlp()
    for _ in range(STEPS):
        job.step()
        x, y = job.batch()
        params = dict(job.model.named_parameters())
        job.see("gradients", torch.func.grad(functools.partial(_loss_of_one, plain))(params, x[0], y[0]))


@loop(defers=None)
def an_ensemble_by_stacking_parameters(job: Job) -> None:
    other = copy.deepcopy(job.model)
    plain = copy.deepcopy(job.model)
    for _ in range(STEPS):
        job.step()
        params, _ = torch.func.stack_module_state([job.model, other])
        call = torch.func.vmap(lambda params, x: torch.func.functional_call(plain, params, (x,)), in_dims=(0, None))
        job.see("outputs", call(params, PROBE))
