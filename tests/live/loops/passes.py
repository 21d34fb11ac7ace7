"""Forward and backward passes of every kind, and the dtypes and layouts that pass through them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


class Tokens(nn.Module):
    """Reads its parameters through torch functions, and tied ones twice."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place, self.head = nn.Embedding(50, 40), nn.Embedding(16, 40), nn.Linear(40, 50, bias=False)
        self.inner = nn.Linear(40, 40)
        self.token.weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(0, tokens.size(1)))
        return self.head(torch.tanh(self.inner(x))).transpose(1, 2)

    @staticmethod
    def batch(generator: torch.Generator, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(50, (4, length), generator=generator)
        return tokens, tokens.roll(1, dims=1)


compilations: list[int] = []  # of the model that was made last: how many operations each graph has


def _counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    compilations.append(len(graph.graph.nodes))
    return importlib.import_module("torch._dynamo.backends.registry").lookup_backend("aot_eager")(
        graph, inputs
    )  # slow to import


def _compiled_whole() -> nn.Module:
    torch.compiler.reset()
    compilations.clear()
    return torch.compile(Tokens(), backend=_counted, fullgraph=True)  # type: ignore[return-value]


def _compiled_in_place() -> nn.Module:
    torch.compiler.reset()
    compilations.clear()
    model = Tokens()
    model.compile(backend=_counted)
    return model


def _tokens_of_two_lengths(job: Job) -> None:
    """The compiler meets parameters and gradients again when a length is new. It must not compile more often than under DDP."""
    for step in range(STEPS):
        x, y = job.model.batch(job.generator, 16 if step != 4 else 9)
        loss = F.cross_entropy(job.call(x), y)  # gradients of the last step are still there
        job.see("loss", loss)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    with torch.no_grad():
        job.see("evaluated", job.call(x))
    job.see("compilations", len(compilations))


@loop(model=_compiled_whole, optimizer=adam, says="the whole model is compiled")
def a_model_compiled_before_it_is_wrapped(job: Job) -> None:
    _tokens_of_two_lengths(job)


@loop(model=_compiled_in_place, optimizer=adam, says="the whole model is compiled")
def a_model_compiled_in_place_before_it_is_wrapped(job: Job) -> None:
    _tokens_of_two_lengths(job)


@loop(model=Tokens, optimizer=adam, says="the whole model is compiled")
def a_model_compiled_around_its_wrapper(job: Job) -> None:
    torch.compiler.reset()
    compilations.clear()
    job.call = torch.compile(job.call, backend=_counted)
    _tokens_of_two_lengths(job)


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
def a_pass_in_no_sync_and_one_through_the_models_parts(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.loss().backward()
        job.loss(None if job.session is None else job.model.forward).backward()
        job.optimizer.step()


@loop(model=Convolutions)
def a_reentrant_checkpoint_around_the_model_after_a_pass_in_no_sync(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.loss().backward()
        x, y = job.batch()
        x.requires_grad_()
        F.cross_entropy(checkpoint(job.call, x, use_reentrant=True), y).backward()
        job.optimizer.step()


@loop(model=Convolutions)
def an_evaluation_in_a_hook_of_the_output(job: Job) -> None:
    @torch.no_grad()
    def evaluate(_: torch.Tensor) -> None:
        job.call.eval()
        job.see("evaluation", job.call(job.batch()[0]).sum())
        job.call.train()

    for _ in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch()
        output = job.call(x)
        output.register_hook(evaluate)
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
