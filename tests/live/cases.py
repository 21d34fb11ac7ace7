"""What the ranks run: each case trains twice, under DDP and under gradlane, and compares every bit."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._foreach_utils import _has_foreach_support

import gradlane
from gradlane.core.checks import check_timeline
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.errors import JobError
from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.all_reduce_sums import SumsInStream
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.process_groups import NewGroups
from gradlane.planning import catalog
from gradlane.testing.streams import CheckedStreams
from tests.live.models import MODELS, OPTIMIZERS
from tests.live.networks import counting_deferred_updates, slow_network
from tests.live.streams import streams_on_the_host


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and optimizer state tensor by name."""
    named = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    names = {id(param): name for name, param in model.named_parameters()}
    for index, (param, state) in enumerate(optimizer.state.items()):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                named[f"{names.get(id(param), index)}/{key}"] = value.detach().clone()  # its index: the model has it no more
    return named


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ (NaN equals itself), or that only one side has."""
    found = sorted(set(left) ^ set(right))
    for name in sorted(set(left) & set(right)):
        a, b = left[name].contiguous(), right[name].contiguous()
        if a.dtype != b.dtype or not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            found.append(name)
    return found


def train(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, batch: Any, steps: int, rank: int) -> list[float]:
    generator = torch.Generator().manual_seed(1000 + rank)
    device = next(model.parameters()).device
    losses = []
    for _ in range(steps):
        x, y = (part.to(device) for part in batch(generator))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def under_ddp(model: str, optimizer: str, steps: int, rank: int, device: str = "cpu", **ddp: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    net = MODELS[model]().to(device)
    opt = OPTIMIZERS[optimizer](net.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = DistributedDataParallel(net, **ddp)
        train(net, wrapped, opt, net.batch, steps, rank)
    return bits_of(net, opt)


def equals_ddp(
    rank: int, world: int, model: str, optimizer: str, policies: list[Any], steps: int = 30, device: str = "cpu", **options: Any
) -> dict[str, list[str]]:
    """For each policy the names that differ from DDP's after `steps` steps; also checks the timeline."""
    reference = under_ddp(model, optimizer, steps, rank, device)
    options = {"profile_iterations": 3, **options}  # Prophet would measure for as long as it takes
    found = {}
    for policy in policies:
        torch.manual_seed(7 + rank)  # attach must make ranks equal to rank 0
        net = MODELS[model]().to(device)
        opt = OPTIMIZERS[optimizer](net.parameters())
        name, knobs = policy if isinstance(policy, (list, tuple)) else (policy, {})
        with gradlane.attach(net, opt, catalog.get(name, **knobs), timeout=30, **options) as session:
            train(net, net, opt, net.batch, steps, rank)
            session.flush()
            found[str(policy)] = differences(reference, bits_of(net, opt))
            assert session.settled
            check_timeline(session.timeline(), session.plan)
    return found


def equals_ddp_on_a_slow_network(rank: int, world: int, **case: Any) -> tuple[dict[str, list[str]], int]:
    """As `equals_ddp`, with sums that arrive after `step()`; and how many updates were deferred."""
    with slow_network(), counting_deferred_updates() as deferred:
        return equals_ddp(rank, world, **case), sum(deferred)


def equals_ddp_with_streams(rank: int, world: int, late: bool, orders: bool, **case: Any) -> dict[str, list[str]]:
    """As `equals_ddp`, with the CPU taken for a device with streams."""
    with streams_on_the_host(late, orders):
        return equals_ddp(rank, world, **case)


def waits_for_the_device(rank: int, world: int, backend: Any, orders: bool) -> tuple[int, list[int]]:
    """How many gradients there are, and how often the host waited for the device in each of eight steps."""
    net = MODELS["convolutions"]()
    opt = OPTIMIZERS["sgd"](net.parameters())
    counts = []
    options: dict[str, Any] = {"backend": backend, "timeout": 30, "profile_iterations": 2}
    with streams_on_the_host(False, orders) as streams, gradlane.attach(net, opt, "wfbp", **options) as session:
        for _ in range(8):
            before = streams.waits
            train(net, net, opt, net.batch, 1, rank)
            session.flush()
            counts.append(streams.waits - before)
        return len(session.plan.tensors), counts


def said_whatever_the_time(lines: list[str]) -> list[str]:
    """`lines` without the one that ends the overlap of a loop which needs all updates before its next forward pass: whether
    it is said depends on when sums arrive.
    """
    return [line for line in lines if "updates were needed before" not in line]


def loses_what_is_stuck(rank: int, world: int) -> tuple[list[bool], frozenset[int], list[str]]:
    """A message whose sum is queued in a stream and never ends, one that has ended, and then the job fails: what the messages'
    starts return, which messages are lost, and threads of ours that are left.
    """
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    slots = GradientBuffers(params)
    specs = tuple(TensorSpec(name, 16) for name in "ab")
    messages = tuple(Message((Slice(tensor, 0, 16),), tensor) for tensor in range(2))
    plan = Plan("test", "test", specs, messages, sequence=(0, 1))
    store = dist.distributed_c10d.PrefixStore("stuck", dist.distributed_c10d._get_default_store())
    backend = AllReduceBackend(torch.device("cpu"), CheckedStreams(late=True), NewGroups(None, store, "stuck"), 30.0)
    sums = backend.prepare(plan, slots.message_buffers(plan))
    assert isinstance(sums, SumsInStream)
    sums.begin([[0, 1]])
    queued = [sums.start(each, [], lambda *_: None, lambda _: None) for each in range(2)]
    sums._ends[0].synchronize()
    backend.interrupt()
    backend.interrupt()
    backend.close(JobError("the job has failed"))
    for thread in threading.enumerate():
        if thread.name == "gradlane-abort":
            thread.join(10)
    return queued, backend.lost, [each.name for each in threading.enumerate() if each.name.startswith("gradlane-abort")]


def classes_that_choose_kernels(rank: int, world: int) -> tuple[set[str], list[bool]]:
    """By the classes of tensors torch chooses kernels: those of parameters in the steps of the second of two optimizers, and
    whether gradients before each step may take foreach kernels.
    """
    seen: set[str] = set()

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.update(type(param).__name__ for group in self.param_groups for param in group["params"])
            return super().step(closure)

    net = MODELS["convolutions"]()
    first, *others = net.children()
    optimizers = [torch.optim.SGD(first.parameters(), 0.1), Noting([p for part in others for p in part.parameters()], 0.1)]
    together = []
    with gradlane.attach(net, optimizers, "bytescheduler", timeout=30, profile_iterations=2):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(6):
            x, y = net.batch(generator)
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            together.append(_has_foreach_support([p.grad for p in net.parameters() if p.grad is not None], x.device))
            for optimizer in optimizers:
                optimizer.step()
    return seen, together
