"""Sessions on a device with streams, with one of the waits that order them left out."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import gradlane
from gradlane.live.backends import staging
from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.backends.staging import Staging
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.turn import given_up
from gradlane.live.session.torch_actions import TorchActions
from gradlane.planning import catalog
from gradlane.testing.streams import CheckedStream, CheckedStreams
from tests.live.cases import bits_of, differences, train, under_ddp
from tests.live.models import MODELS, OPTIMIZERS
from tests.live.networks import network_until_awaited
from tests.live.streams import streams_on_the_host

Fault = Callable[[], Any]


def _drops_after(really: Any) -> Any:
    return lambda stream, work, after=(): really(stream, work, () if not stream.is_scripts else after)


def _joins_the_first_alone(really: Any) -> Any:
    def bring_up(to_and_fro: Staging, tensors: Sequence[int]) -> None:
        with patch.object(CheckedStreams, "join", lambda streams, event: None):
            really(to_and_fro, tensors)
        for tensor in tensors[:1]:
            to_and_fro._streams.join(to_and_fro._returned[tensor])

    return bring_up


@contextlib.contextmanager
def _updates_where_they_are_used() -> Iterator[None]:
    def make(actions: TorchActions, makes_updates: Callable[[], None]) -> None:
        actions.home = actions._driver.streams.scripts()  # type: ignore[union-attr]
        makes_updates()

    with patch.object(TorchActions, "make_at_home", make):
        yield


def _tells_at_once(leaving: Any, streams: CheckedStreams) -> None:
    while (copy := leaving.get()) is not None:
        copy[1](None)


FAULTS: dict[str, Fault] = {
    "none": contextlib.nullcontext,
    "a copy down, or a sum, does not wait for the gradient": lambda: patch.object(
        CheckedStream, "run", _drops_after(CheckedStream.run)
    ),
    "nobody waits for a copy up, or a sum": lambda: patch.object(CheckedStreams, "join", lambda streams, event: None),
    "the host does not wait for a copy down": lambda: patch.object(staging, "_tell_ends", _tells_at_once),
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
    """What differs from DDP after twelve steps under bytescheduler, with all deferred that can be, and the first race."""
    reference = under_ddp(model, "sgd", 12, rank)
    policy = catalog.get("bytescheduler", partition_bytes=2000, credit_bytes=8000)
    race, found = "", ["not trained to its end"]
    with FAULTS[fault](), network_until_awaited():
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


def is_read_by_a_slow_thread(rank: int, world: int, backend: Any) -> tuple[list[str], bool, str]:
    """As `trains`. After the sixth step a thread reads a parameter. When it has waited for the sum, the training thread is
    further: it has made the update, and produced the next gradients. Also whether the thread has waited.
    """
    reference = under_ddp("convolutions", "sgd", 12, rank)
    race, found, is_there, goes_on = "", ["not trained to its end"], threading.Event(), threading.Event()
    really = Driver._wait

    def wait(driver: Driver, tensor: int | None, what: str) -> None:
        really(driver, tensor, what)
        if threading.current_thread().name == "reader":
            is_there.set()
            with given_up():
                goes_on.wait(30)

    with patch.object(Driver, "_wait", wait), network_until_awaited():
        try:
            with streams_on_the_host(late=False):
                torch.manual_seed(7)
                net: Any = MODELS["convolutions"]()
                opt = OPTIMIZERS["sgd"](net.parameters())
                reader = threading.Thread(target=lambda: next(net.parameters()).sum(), name="reader")
                generator = torch.Generator().manual_seed(1000 + rank)
                with gradlane.attach(net, opt, "bytescheduler", timeout=30, profile_iterations=3, backend=backend) as session:
                    for step in range(12):
                        x, y = net.batch(generator)
                        opt.zero_grad()
                        if step == 6:
                            reader.start()
                            is_there.wait(10)
                        nn.functional.cross_entropy(net(x), y).backward()
                        if step == 6:
                            goes_on.set()
                            reader.join(30)
                        opt.step()
                    session.flush()
                    found = differences(reference, bits_of(net, opt))
        except AssertionError as error:
            race = str(error)
    return found, is_there.is_set(), race


def fails_meanwhile(rank: int, world: int, launching: bool) -> str:
    """Rank 1 fails while rank 0, whose sums take their turn in a stream, is in its backward pass, or blocked in a launch.

    Returns how this rank's step ends.
    """
    net = MODELS["convolutions"]()
    opt = OPTIMIZERS["sgd"](net.parameters())
    with contextlib.suppress(AssertionError), streams_on_the_host(late=False, orders=True):
        try:
            with gradlane.attach(net, opt, "wfbp", timeout=30, profile_iterations=2, backend="all-reduce") as session:
                train(net, net, opt, net.batch, 5, rank)
                torch.distributed.barrier()
                if rank == 1:
                    raise ValueError("as it was told to")
                backend: Any = session._parts.backend
                aborted = threading.Event()
                abort, run = backend._groups.abort, backend._stream.run

                def blocks(work: Any, after: Any = ()) -> Any:
                    assert not launching or aborted.wait(20), "nothing ended what the launch waits for"
                    return run(work, after)

                def end() -> None:
                    aborted.set()
                    abort()

                backend._groups.abort = end
                backend._stream.run = blocks
                x, y = net.batch(torch.Generator().manual_seed(1))
                output = net(x)
                # after gradlane's own hook, which has begun the iteration
                output.register_hook(lambda _: None if launching else _wait_for(lambda: session.failed))
                nn.functional.cross_entropy(output, y).backward()
                opt.step()
                session.flush()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def _wait_for(predicate: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not predicate() and time.monotonic() < end:
        time.sleep(0.005)


def attaches_in_vain(rank: int, world: int) -> int:
    """How many threads of `Staging` are left of two sessions that failed as they began."""
    for _ in range(2):
        net = MODELS["convolutions"]()
        opt = OPTIMIZERS["sgd"](net.parameters())
        with (
            contextlib.suppress(gradlane.GradlaneError, RuntimeError),
            streams_on_the_host(late=False),
            patch.object(ParameterServerBackend, "prepare", side_effect=RuntimeError("connection lost")),
        ):
            gradlane.attach(net, opt, "wfbp", timeout=20, backend="server")
        del net, opt
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread.name == "gradlane-staging"]
    for thread in left:
        thread.join(10)
    return sum(thread.is_alive() for thread in left)


def shares_a_gradient(rank: int, world: int, orders: bool, backend: Any) -> bool:
    """Whether parameters stay finite if the gradient of one stands in another's `.grad`, too, when the plan changes."""
    net = TwoStreams()
    opt = OPTIMIZERS["sgd"](net.parameters())
    with streams_on_the_host(late=False, orders=orders):
        with gradlane.attach(net, opt, "bytescheduler", timeout=20, profile_iterations=2, backend=backend) as session:
            for step in range(5):
                train(net, net, opt, net.batch, 1, rank + step)
                net.first.weight.grad = net.shared.weight.grad
            session.flush()
        return all(bool(param.isfinite().all()) for param in net.parameters())
