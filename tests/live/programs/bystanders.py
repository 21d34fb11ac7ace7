"""Actions of others than the training loop: threads, child processes, signal handlers, functorch, TorchScript."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

from gradlane.errors import GradlaneError
from tests.live.programs.run import Run, action
from tests.live.unasked import UNASKED

_WAIT_S = 30.0


@action
def thread(run: Run, what: str) -> None:
    """Let a thread read parameters, state, or all by `state_dict`. It goes on during the next passes, and ends before whatever
    changes a parameter.
    """
    found: list[Any] = []

    def read() -> None:
        if what == "parameters":
            found.extend(param.detach().clone() for param in run.parameters())
        elif what == "backwards":
            found.extend(param.detach().clone() for param in reversed(run.parameters()))
        elif what == "state":
            found.extend(value.clone() for state in run.states() for value in state.values() if isinstance(value, torch.Tensor))
        else:
            found.extend(param.clone() for param in run.model.state_dict().values() if isinstance(param, torch.nn.Parameter))
            found.extend(param.norm().detach() for param in run.parameters())

    reader = threading.Thread(target=read)
    reader.start()

    def join() -> None:
        reader.join(_WAIT_S)
        assert not reader.is_alive(), "the thread still waits"
        run.see(f"a thread's {what}", found)

    run.threads.append(join)


@action
def fork(run: Run, what: str) -> None:
    """Fork, and let the child read parameters, or state."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            told: Any
            try:
                values = run.parameters() if what == "parameters" else [v for s in run.states() for v in s.values()]
                told = [value.detach().numpy().copy() for value in values if isinstance(value, torch.Tensor)]
            except GradlaneError as error:
                told = f"in a child: {error}"
            with open(writes, "wb") as pipe:
                pickle.dump(told, pipe)
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        told = pickle.load(pipe)
    os.waitpid(child, 0)
    if isinstance(told, str):
        raise GradlaneError(told)
    run.see(f"a child's {what}", told)


@action
def interrupt(run: Run, what: str) -> None:
    """Let a signal handler save the state, or read parameters."""
    seen: list[bool] = []

    def handle(*_: Any) -> None:
        if what == "save":
            run.see("saved by a handler", [run.model.state_dict(), [each.state_dict()["state"] for each in run.optimizers]])
        else:
            run.see("read by a handler", [param.detach().clone() for param in run.parameters()])
        seen.append(True)

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        while not seen:
            signal.sigtimedwait((), 0.001)
    finally:
        signal.signal(signal.SIGUSR2, before)


@action
def functorch(run: Run, what: str) -> None:
    """vmap, grad, jvp or functionalize, of a function that reads live parameters."""
    weight = run.parameters()[-1]
    transforms: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.vmap(lambda row: row * 2)(weight),
        "closed": lambda: torch.vmap(lambda factor: (weight * factor).sum())(torch.arange(3.0)),
        "grad": lambda: torch.func.grad(lambda value: value.square().sum())(weight),
        "jvp": lambda: torch.func.jvp(lambda value: value.square(), (weight,), (torch.ones_like(weight),)),
        "functionalize": lambda: torch.func.functionalize(lambda value: value.mul(2))(weight),
    }
    run.see(f"by {what}", [value.detach() for value in _flat(transforms[what]())])


@action
def scripted(run: Run, what: str) -> None:
    """A scripted function that is given live parameters, by themselves or in a list."""
    params = run.parameters()
    found = _SCRIPTED.alone(params[-1]) if what == "alone" else _SCRIPTED.listed(params)
    run.see(f"by a scripted function, {what}", [found.detach()])


_SCRIPTED = torch.jit.CompilationUnit("""
def alone(weight):
    return weight * 2

def listed(weights: List[Tensor]):
    return weights[0].sum() * 2 + weights[-1].sum()
""")


@action
def unasked(run: Run, way: str) -> None:
    """Parameters whose values are got past torch's functions."""
    params = [param for param in run.parameters() if param.ndim]
    run.see(f"by {way}", [UNASKED[way](param).detach() for param in (params[0], params[-1])])


@functools.singledispatch
def _flat(value: Any) -> list[torch.Tensor]:
    return [value]


@_flat.register
def _(value: tuple) -> list[torch.Tensor]:  # type: ignore[type-arg]
    return [item for each in value for item in _flat(each)]
