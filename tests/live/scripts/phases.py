"""A rank of a job in which one rank comes to harm: `phases.py PHASE CULPRIT HARM BACKEND`.

Where PHASE says, the culprit prints the time, of the clock that all processes share, and does HARM to itself. Nothing waits for
a time to pass: PHASE names the call at which it happens.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from fcntl import ioctl
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan
from gradlane.core.policy import whole
from gradlane.core.profile import Profile
from gradlane.errors import JobError
from gradlane.live.adapt.decisions import ControlDecision, ControlDecisions
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends import probe
from gradlane.live.backends.base import Backend
from gradlane.live.backends.process_groups import NewGroups
from gradlane.live.comm.control_channel import ControlChannel
from gradlane.live.comm.driver import Driver
from gradlane.live.session.session import Session
from gradlane.live.startup import attach, handshake
from gradlane.transport import Node
from tests.live.phases import ENDED

STEPS, STEADY_STEP, WORKER_S = 14, 10, 8
SIOCSIFFLAGS = 0x8914


class Call(NamedTuple):
    """A call of a function, from 1. after: the harm comes when it has returned."""

    owner: Any
    name: str
    number: int = 1
    after: bool = False


PHASES: dict[str, Call] = {
    "meeting": Call(ControlChannel, "_keep", after=True),
    "handshake": Call(handshake, "settle"),
    "groups": Call(NewGroups, "make"),
    "servers": Call(Node, "join"),
    "first copy": Call(attach, "copy_from"),
    "measuring": Call(probe, "slowest_of", 3),
    "first plan": Call(Driver, "take_up"),
    "early iteration": Call(Driver, "ready", 8),
    "first decision": Call(Planner, "decide"),
    "sharing a plan": Call(Planner, "_share"),
    "opening lanes": Call(Driver, "take_up", 2),
    "switch": Call(Planner, "change", 2),
    "other lanes": Call(Driver, "take_up", 4),
    "close": Call(Session, "close"),
    "closing": Call(Driver, "close"),
}
"""By phase, the call at which the harm comes."""
STEADY = ("steady", "a forked worker lives on")
"""Phases that are a step of the loop."""


class Lanes(msgspec.Struct, frozen=True):
    """A message for each tensor, dealt over lanes."""

    name: ClassVar[str] = "lanes"
    paper: ClassVar[str] = "none: for tests"
    differs: ClassVar[str] = "-"

    lanes: int = 1

    def plan(self, profile: Profile, network: Network) -> Plan:
        messages = [Message((whole(profile, tensor),), lane=tensor % self.lanes) for tensor in range(len(profile.tensors))]
        return Plan(self.name, profile.model, profile.specs, tuple(messages), (Lane(),) * self.lanes)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(150, 150) for _ in range(6)), nn.BatchNorm1d(150))


class Turns:
    """Another plan every second iteration, of one lane and of two in turns; of two backends in turns, where there are two."""

    over, settled = False, True

    def __init__(self, rank: int) -> None:
        self._rank, self._decisions = rank, ControlDecisions()
        self._lanes = itertools.cycle((1, 2))

    def start(self, *_: Any) -> None:
        pass

    def decide(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        if not self._decisions.is_due(driver):
            return None
        self._decisions.announce(driver, ControlDecision.CHANGE if self._rank == 0 else None, 2)
        lanes = next(self._lanes)
        over = planner.places[lanes % len(planner.places)].backend
        return planner.change(Lanes(lanes) if self._rank == 0 else None, backend, driver.failures.collective, over)

    def record(self) -> None:
        return None

    def close(self) -> None:
        pass


def link_down() -> None:
    with socket.socket() as any_socket:
        ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"eth0", 0))


def come_to(harm: str) -> None:
    print(time.monotonic(), flush=True)
    if harm == "exception":
        raise ValueError("by the test")
    if harm == "link":
        link_down()
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{harm}"))


def put(call: Call, harm: Callable[[], None]) -> None:
    """Have `harm` called where `call` says."""
    original, calls = getattr(call.owner, call.name), itertools.count(1)

    def instead(*args: Any, **kwargs: Any) -> Any:
        is_due = next(calls) == call.number
        if is_due and not call.after:
            harm()
        result = original(*args, **kwargs)
        if is_due and call.after:
            harm()
        return result

    setattr(call.owner, call.name, instead)


def main(phase: str, culprit: int, harm: str, backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == culprit and phase in PHASES:
        put(PHASES[phase], lambda: come_to(harm))
    if phase == "meeting" and rank not in (0, culprit or 1):
        signal.pause()  # so that the others wait for it
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    how: dict[str, Any] = {"policy": "auto"} if backend == "both" else {"policy": Lanes(2), "backend": backend}
    session: Any = gradlane.attach(model, optimizer, profile_iterations=2, **how)
    session._parts.controller = Turns(rank)
    for step in range(STEPS):
        if phase in STEADY and (step, rank) == (STEADY_STEP, culprit):
            if phase != "steady" and os.fork() == 0:
                signal.alarm(WORKER_S)
                signal.pause()
            come_to(harm)
        optimizer.zero_grad()
        model(torch.ones(4, 150)).sum().backward()
        optimizer.step()
    session.close()
    if harm == "link":
        print(time.monotonic(), ENDED, rank, flush=True)
    os._exit(0)  # finalising an interpreter with torch takes seconds on a busy machine, which belong to no phase


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    except JobError as error:
        print(time.monotonic(), type(error).__name__, getattr(error, "rank", None), flush=True)
        raise
