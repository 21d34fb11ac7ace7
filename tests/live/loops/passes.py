"""Forward and backward passes of every kind, and the dtypes and layouts that pass through them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.live.loops.job import STEPS, Job, Mlp, adam, loop
from tests.live.models import Convolutions

# -- compiled and scripted ---------------------------------------------------------------------------------


@loop()
def compiled_blocks(job: Job) -> None:
    torch.compiler.reset()
    for layer in job.model.layers:
        layer.compile(backend="aot_eager")
    for _ in range(STEPS):
        job.step()


@loop(defers=True, says="the whole model is compiled")
def a_compiled_model(job: Job) -> None:
    torch.compiler.reset()
    job.call = torch.compile(job.call, backend="aot_eager")
    for _ in range(STEPS):
        job.step()


@loop(defers=True, says="the whole model is compiled")
def a_model_compiled_in_place(job: Job) -> None:
    torch.compiler.reset()
    job.model.compile(backend="aot_eager")
    for _ in range(STEPS):
        job.step()


class Scripted(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = torch.jit.script(self.layers[1])


@loop(model=Scripted)
def a_scripted_part(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


# -- forward passes of every kind --------------------------------------------------------------------------


@loop()
def an_exception_in_forward_that_the_script_catches(job: Job) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bad batch")

    for step in range(STEPS):
        if step in (0, 3, 5):
            handle = job.model.layers[2].register_forward_pre_hook(fail)
            with contextlib.suppress(ValueError):
                job.step()
            handle.remove()
        job.step()


@loop()
def functional_calls(job: Job) -> None:
    prefix = "module." if job.session is None else ""
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch()
        scaled = {prefix + name: param * 0.9 for name, param in job.model.named_parameters()}
        F.cross_entropy(torch.func.functional_call(job.call, scaled, (x,)), y).backward()
        job.optimizer.step()


@loop()
def a_model_called_through_its_parts(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch()
        if job.session is None:
            output = job.call(x)
        else:
            for layer in job.model.layers[:-1]:
                x = torch.tanh(layer(x))
            output = job.model.layers[-1](x)
        F.cross_entropy(output, y).backward()
        job.optimizer.step()


@loop()
def two_forward_passes_and_one_backward(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        (job.loss() + job.loss()).backward()
        job.optimizer.step()


@loop()
def a_penalty_on_the_parameters(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.loss()
        (loss + 0.01 * sum(param.square().sum() for param in job.model.parameters())).backward()
        job.optimizer.step()


@loop()
def a_backward_pass_that_is_not_the_models(job: Job) -> None:
    other = nn.Linear(3, 1)
    for _ in range(STEPS):
        job.step()
        other(torch.ones(2, 3)).sum().backward()
        x = job.batch()[0].requires_grad_()
        job.see("gradient of the input", torch.autograd.grad(job.model(x).sum(), x)[0])


# -- dtypes and layouts ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A part in float64 and a part in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Linear(12, 50, dtype=torch.float64), nn.Tanh(), nn.Linear(50, 30, dtype=torch.float64))
        self.coarse = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.coarse(self.fine(x.double()).float())

    batch = staticmethod(Mlp.batch)


@loop(model=Mixed, optimizer=adam)
def two_dtypes_in_one_model(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class Brain(Mlp):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


@loop(model=Brain)
def a_bfloat16_model(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=lambda: Convolutions().to(memory_format=torch.channels_last))
def a_channels_last_model(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        assert job.model.features[4].weight.is_contiguous(memory_format=torch.channels_last)


@loop(model=Convolutions, attach={"broadcast_buffers": False}, ddp={"broadcast_buffers": False})
def buffers_left_to_each_rank(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=Convolutions)
def buffers_and_accumulation(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.loss().backward()
        job.loss().backward()
        job.optimizer.step()


class Parametrized(Mlp):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.layers[1])
        torch.nn.utils.parametrizations.spectral_norm(self.layers[2])


@loop(model=Parametrized)
def parametrizations(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
