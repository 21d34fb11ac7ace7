"""Sessions on a device with streams, with one of the waits that order them left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import gradlane
from gradlane.live.backends.staging import Staging
from gradlane.live.session.deferred_updates import DeferredUpdates
from gradlane.planning import catalog
from gradlane.testing.streams import CheckedStream, CheckedStreams
from tests.live.cases import bits_of, differences, train, under_ddp
from tests.live.models import MODELS, OPTIMIZERS
from tests.live.networks import slow_network
from tests.live.streams import streams_on_the_host

Fault = Callable[[], Any]


def _drops_after(really: Any) -> Any:
    return lambda stream, work, after=(): really(stream, work, () if not stream.is_scripts else after)


def _joins_the_first_alone(really: Any) -> Any:
    def bring_up(staging: Staging, tensors: Sequence[int]) -> None:
        with patch.object(CheckedStreams, "join", lambda streams, event: None):
            really(staging, tensors)
        for tensor in tensors[:1]:
            staging._streams.join(staging._returned[tensor])

    return bring_up


@contextlib.contextmanager
def _updates_where_they_are_used() -> Iterator[None]:
    def make(deferred: DeferredUpdates) -> None:
        deferred.home = deferred._driver.streams.scripts()  # type: ignore[union-attr]
        deferred.make_all_current()

    with patch.object(DeferredUpdates, "make_all_current_at_home", make):
        yield


def _tells_at_once(staging: Staging) -> None:
    while (leaving := staging._leaving.get()) is not None:
        leaving[1](None)


FAULTS: dict[str, Fault] = {
    "none": contextlib.nullcontext,
    "a copy down, or a sum, does not wait for the gradient": lambda: patch.object(
        CheckedStream, "run", _drops_after(CheckedStream.run)
    ),
    "nobody waits for a copy up, or a sum": lambda: patch.object(CheckedStreams, "join", lambda streams, event: None),
    "the host does not wait for a copy down": lambda: patch.object(Staging, "_run", _tells_at_once),
    "of sums that are used together only the first is waited for": lambda: patch.object(
        Staging, "bring_up", _joins_the_first_alone(Staging.bring_up)
    ),
    "updates run on the stream on which a parameter is used": _updates_where_they_are_used,
}


class TwoStreams(nn.Module):
    """Half of it runs on a side stream, which has parameters of its own and one that the other half uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.beside = nn.Linear(16, 16)
        self.streams: CheckedStreams | None = None
        self.sides: list[CheckedStream] = []

    def use(self, streams: CheckedStreams) -> None:
        """Run on `streams` from now on; before, and without, everything runs on one."""
        self.streams, self.sides = streams, [streams.open(), streams.open()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self._branch(side, x) for side in self.sides or (None, None)]
        y = self.shared(self.first(x).relu())
        for part, end in parts:
            if end is not None:
                assert self.streams is not None
                self.streams.join(end)
                self.streams.used_by(part, self.streams.scripts())
            y = y + part
        return self.last(y)

    def _branch(self, side: CheckedStream | None, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if side is None or self.streams is None:
            return self.shared(self.beside(x).relu()), None
        main, streams = self.streams.scripts(), self.streams
        side.run(lambda: None, after=[streams.so_far()])

        def saved(tensor: torch.Tensor) -> torch.Tensor:
            streams.used_by(tensor, main)  # the checker has the backward pass on one stream
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor), streams.entered(side):
            return self.shared(self.beside(x).relu()), streams.so_far()

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


MODELS["two streams"] = TwoStreams


def trains(
    rank: int, world: int, model: str, late: bool, orders: bool, backend: Any, fault: str = "none"
) -> tuple[list[str], str]:
    """What differs from DDP after twelve steps under bytescheduler, on a network that is slow, and the first race."""
    reference = under_ddp(model, "sgd", 12, rank)
    policy = catalog.get("bytescheduler", partition_bytes=2000, credit_bytes=8000)
    race, found = "", ["not trained to its end"]
    with FAULTS[fault](), slow_network():
        try:
            with streams_on_the_host(late, orders) as streams:
                torch.manual_seed(7)
                net: Any = MODELS[model]()
                if isinstance(net, TwoStreams):
                    net.use(streams)
                opt = OPTIMIZERS["sgd"](net.parameters())
                with gradlane.attach(net, opt, policy, timeout=30, profile_iterations=3, backend=backend) as session:
                    train(net, net, opt, net.batch, 12, rank)
                    session.flush()
                    found = differences(reference, bits_of(net, opt))
        except AssertionError as error:
            race = str(error)
    return found, race
