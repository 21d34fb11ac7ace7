"""Reads beside the training: by threads, signal handlers, forks, other processes, torch.func and compiled functions."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.live.loops.job import HELD, STEPS, Job, adam, after_steps, loop

# -- threads -----------------------------------------------------------------------------------------------------


def _beside_the_next_step(job: Job, read: Callable[[], torch.Tensor]) -> None:
    """A thread reads while the next forward and backward pass run; it is joined before the step, so that DDP's values are
    defined.
    """
    found: list[torch.Tensor] = []
    thread = None
    for step in range(2 * STEPS):
        job.optimizer.zero_grad()
        job.backward()
        if thread is not None:
            thread.join()
        job.optimizer.step()
        thread = None
        if step % 2:
            thread = threading.Thread(target=lambda: found.append(read()))
            thread.start()
    if thread is not None:
        thread.join()
    for read_then in found:
        job.see("read", read_then)


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).clone() for tensor in tensors])


@loop(optimizer=adam, defers=None, says=None)
def a_thread_copies_the_parameters(job: Job) -> None:
    _beside_the_next_step(job, lambda: _flat(job.model.parameters()))


@loop(defers=None, says=None)
def a_thread_copies_the_last_parameter_first(job: Job) -> None:
    _beside_the_next_step(job, lambda: _flat(reversed(list(job.model.parameters()))))


@loop(optimizer=adam, defers=None, says=None)
def a_thread_saves_a_checkpoint(job: Job) -> None:
    def saved() -> torch.Tensor:
        state = job.optimizer.state_dict()["state"]
        return _flat([*job.model.state_dict().values(), *(each["exp_avg"] for each in state.values())])

    _beside_the_next_step(job, saved)


@loop(optimizer=adam, defers=None, says=None)
def a_thread_reads_momenta(job: Job) -> None:
    _beside_the_next_step(job, lambda: _flat([job.optimizer.state[param]["exp_avg"] for param in job.model.parameters()]))


class Towers(nn.Module):
    """Two towers that share their weights, each in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleList([nn.Linear(12, 60), nn.Linear(60, 60), nn.Linear(60, 12)])
        self.head = nn.Linear(24, 6)

    def _tower(self, x: torch.Tensor, into: list[Any], place: int) -> None:
        for layer in self.shared:
            x = torch.tanh(layer(x))
        into[place] = x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: list[Any] = [None, None]
        threads = [threading.Thread(target=self._tower, args=(part, out, place)) for place, part in enumerate((x, -x))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.head(torch.cat(out, 1))

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 12, generator=generator), torch.randint(6, (8,), generator=generator)


@loop(model=Towers)
def towers_in_threads_that_share_weights(job: Job) -> None:
    for _ in range(2 * STEPS):
        job.step()


# -- signals -----------------------------------------------------------------------------------------------------


@contextmanager
def _handling(handler: Callable[[Any, Any], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@loop(optimizer=adam, defers=None, says=None)
def a_signal_saves_a_checkpoint_in_the_forward_pass(job: Job) -> None:
    saved: list[torch.Tensor] = []

    def forward_hook(module: nn.Module, args: Any, output: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)

    with _handling(lambda number, frame: saved.append(_flat(job.model.state_dict().values()))):
        handle = job.model.layers[1].register_forward_hook(forward_hook)
        for _ in range(STEPS):
            job.step()
        handle.remove()
    for each in saved:
        job.see("saved", each)


# -- forks and other processes -----------------------------------------------------------------------------------


def _in_a_child(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `read` gives in a process that is forked here."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            os.write(writable, read().double().sum().view(1).numpy().tobytes())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert len(told) == 8, "the child has read nothing"
    return torch.frombuffer(bytearray(told), dtype=torch.float64)


@loop(optimizer=adam, defers=None, says=None)
def a_child_reads_parameters_and_momenta(job: Job) -> None:
    def read() -> torch.Tensor:
        return _flat([*job.model.parameters(), *(state["exp_avg"] for state in job.optimizer.state.values())])

    after_steps(job, lambda: _in_a_child(read))


@loop(defers=None, says=None)
def a_child_trains_a_step_of_its_own(job: Job) -> None:
    def train() -> torch.Tensor:
        job.optimizer.zero_grad()
        with torch.enable_grad():
            job.model(torch.ones(2, 12)).sum().backward()
        job.optimizer.step()
        return _flat(job.model.parameters())

    torch.set_num_threads(1)  # a child has no thread of its parent's pool
    after_steps(job, lambda: _in_a_child(train))


@loop(defers=False, says=HELD)
def another_process_reads_shared_memory(job: Job) -> None:
    job.model.share_memory()
    asked, ask = os.pipe()
    answered, answer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            memory = [param.detach() for param in job.model.parameters()]
            while os.read(asked, 1) == b"?":
                os.write(answer, sum(part.double().sum() for part in memory).view(1).numpy().tobytes())  # type: ignore[union-attr]
        finally:
            os._exit(0)
    for _ in range(STEPS):
        job.step()
        os.write(ask, b"?")
        job.see("read", torch.frombuffer(bytearray(os.read(answered, 8)), dtype=torch.float64))
    os.write(ask, b".")
    os.waitpid(child, 0)
    for pipe in (asked, ask, answered, answer):
        os.close(pipe)


# -- past torch functions ----------------------------------------------------------------------------------------


class Ensemble(nn.Module):
    """The weights of all members are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.Parameter(torch.randn(4, 12, 60) * 0.1)
        self.head = nn.Linear(60, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x.expand(4, -1, -1).bmm(self.members)).mean(0))

    batch = staticmethod(Towers.batch)


@loop(model=Ensemble, defers=None, says=None)
def members_of_an_ensemble_by_vmap(job: Job) -> None:
    after_steps(job, lambda: torch.vmap(lambda weight: torch.ones(2, 12) @ weight)(job.model.members))


@loop(model=Ensemble, defers=None, says=None)
def functionalized(job: Job) -> None:
    after_steps(job, lambda: torch.func.functionalize(lambda weight: weight * 2.0)(job.model.members))


@loop(model=Ensemble, defers=None, says=None)
def jacobians_and_tangents(job: Job) -> None:
    def read() -> torch.Tensor:
        weight = job.model.members
        _, tangent = torch.func.jvp(lambda weight: (weight**2).sum(), (weight,), (torch.ones_like(weight.detach()),))
        return tangent

    after_steps(job, read)


@loop(optimizer=adam, defers=None, says=None)
def the_state_by_vars(job: Job) -> None:
    def momenta() -> torch.Tensor:
        state = vars(job.optimizer)["state"]
        return _flat([state[param]["exp_avg"] for param in job.model.parameters()])

    after_steps(job, momenta)


# -- compiled functions of the script ------------------------------------------------------------------------------


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", **options)


@loop(optimizer=adam, defers=None, says=None)
def a_compiled_function_evaluates_with_fullgraph(job: Job) -> None:
    layer = job.model.layers[0]
    evaluate = _compiled(lambda x: F.linear(x, layer.weight, layer.bias).square().mean(), fullgraph=True)
    after_steps(job, lambda: evaluate(torch.ones(2, 12)))


@loop(defers=False, says=None)
def a_compiled_function_writes_gradients(job: Job) -> None:
    def halve(params: list[nn.Parameter]) -> None:
        for param in params:
            if param.grad is not None:
                param.grad.mul_(0.5)

    halve = _compiled(halve)
    params = list(job.model.parameters())
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        with torch.no_grad():
            halve(params)
        job.optimizer.step()
