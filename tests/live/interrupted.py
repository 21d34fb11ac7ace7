"""Cases for `test_interruptions.py`: a signal handler that reads everything, at every line of a session's code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradlane
from tests.live.loops.job import GIVEN, POLICIES, Mlp
from tests.live.networks import counting_deferred_updates, slow_network

_CODE = str(Path(gradlane.__file__).parent / "live")
_STEPS = 400


class _EachLine:
    """Raises SIGUSR1 once while it is armed, at the next line of gradlane's code that has not been interrupted yet."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.armed = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_CODE):
            return None
        if event == "line" and self.armed:
            line = (frame.f_code.co_filename, frame.f_lineno)
            if line not in self.lines:
                self.lines.add(line)
                self.armed = False
                signal.raise_signal(signal.SIGUSR1)
        return self


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    momenta = [each["momentum_buffer"] for each in state.values() if each.get("momentum_buffer") is not None]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *momenta)]


def _train(
    rank: int, wrap: Callable[[Any, Any], Any], after_step: Callable[[Any, Any], None], before: Callable[[Any, Any], None]
) -> None:
    torch.manual_seed(7)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    call, generator = wrap(model, optimizer), torch.Generator().manual_seed(rank)
    for _ in range(_STEPS):
        before(model, optimizer)
        x, y = Mlp.batch(generator)
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()
        after_step(model, optimizer)


def at_every_line(rank: int, world: int, backend: str) -> tuple[int, int, int, bool]:
    """Train under DDP and under gradlane, where a handler reads all values at a line of gradlane's code in each step.

    Returns:
        How many lines were interrupted, how many values read were of no single step, how many updates were deferred, and
        whether the last step's values are DDP's.
    """
    whole: list[list[torch.Tensor]] = []
    _train(
        rank,
        lambda model, optimizer: DistributedDataParallel(model),
        lambda model, optimizer: whole.append(_values(model, optimizer)),
        lambda model, optimizer: None,
    )
    lines, read, last = _EachLine(), [], []
    subjects: list[Any] = []
    steps: list[None] = []

    def handler(number: int, frame: Any) -> None:
        if subjects:
            read.append(_values(*subjects))

    def before(*of: Any) -> None:
        subjects[:] = of
        steps.append(None)
        lines.armed = len(steps) % 3 > 0  # a script that needs all updates in each step is not deferred any more

    def after_step(model: Any, optimizer: Any) -> None:
        last[:] = [(model, optimizer)]

    policy = gradlane.policies.get("bytescheduler", **POLICIES["bytescheduler"])
    sessions = []

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        sessions.append(
            gradlane.attach(model, optimizer, policy, backend=backend, network=GIVEN, profile_iterations=1, timeout=20)
        )
        return model

    handled = signal.signal(signal.SIGUSR1, handler)
    sys.settrace(lines)
    try:
        with slow_network(), counting_deferred_updates() as deferred:
            _train(rank, attach, after_step, before)
            sys.settrace(None)
            sessions[0].close()
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, handled)
    ((model, optimizer),) = last
    mixed = sum(not any(_are_equal(values, of) for of in whole) for values in read if len(values) == len(whole[0]))
    return len(lines.lines), mixed, sum(deferred), _are_equal(_values(model, optimizer), whole[-1])


def forked_after_a_failure(rank: int, world: int) -> tuple[int, str]:
    """How many updates were deferred when the job failed, and what a read of the parameters ended in, in a forked child."""
    torch.manual_seed(7)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = gradlane.policies.get("bytescheduler", **POLICIES["bytescheduler"])
    with slow_network():
        session = gradlane.attach(
            model, optimizer, policy, backend="all-reduce", network=GIVEN, profile_iterations=1, timeout=20
        )
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            x, y = Mlp.batch(generator)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        owed = len(session._parts.updates)
        torch.distributed.barrier()
        session.abort(RuntimeError("as a test asks for it"))
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                text = f"{sum(param.sum().item() for param in model.parameters())}"
            except gradlane.errors.JobError as error:
                text = str(error)
            os.write(writes, text.encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as answer:
            told = answer.read()
        os.waitpid(child, 0)
        with contextlib.suppress(gradlane.errors.JobError):
            session.close()
    return owed, told


def _are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
