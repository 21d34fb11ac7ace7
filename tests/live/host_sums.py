"""What the ranks of test_host_sums.py do: groups and sessions of two hosts with two ranks each, which are processes of one
machine.

Which host a rank is on is what it says of itself (`formation.host_name`). The connections between these hosts are TCP, as
between real ones; in the lab they are namespaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import socket
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.core.checks import check_timeline
from gradlane.errors import GradlaneError
from gradlane.live import c10d
from gradlane.planning import catalog
from gradlane.schedule import replay
from gradlane.transport import formation
from tests.live import cases, collectives
from tests.live.cases import bits_of, differences, train
from tests.live.loops import GIVEN
from tests.live.models import MODELS, OPTIMIZERS

_real = formation.host_name


def be_on(rank: int, world: int, hosts: list[int]) -> None:
    """From now on this rank is on `hosts[rank]`."""
    formation.host_name = lambda: f"{_real()} {hosts[rank]}"


def equals_ddp(rank: int, world: int, **case: Any) -> dict[str, list[str]]:
    """As `cases.equals_ddp`, on as many hosts as there are ranks."""
    with patch.object(formation, "host_name", lambda: f"{_real()} {rank}"):
        return cases.equals_ddp(rank, world, **case)


def check(**case: Any) -> None:
    collectives.check(**case)


def node_of(group: Any) -> Any:
    return group._node if hasattr(group, "_node") else group._get_backend(torch.device("cpu"))._node


def sums(rank: int, world: int, dtype: str, sizes: list[int], **options: Any) -> list[bytes]:
    """The bits of sums of noise."""
    group = dist.new_group(backend="gradlane", pg_options=c10d.Options(**options))
    generator = torch.Generator().manual_seed(rank)
    data = [(torch.randn(size, generator=generator) * 50).to(getattr(torch, dtype)) for size in sizes]
    works = [dist.all_reduce(each, group=group, async_op=True) for each in data]
    for work in works:
        work.wait()
    dist.destroy_process_group(group)
    return [each.view(torch.uint8).numpy().tobytes() for each in data]


def sent(rank: int, world: int, what: str, **options: Any) -> int:
    """Bytes that this rank's node sends for a collective of 4 MB."""
    group: Any = dist.new_group(backend="gradlane", pg_options=c10d.Options(**options))
    whole, parts = torch.ones(1_000_000), [torch.ones(1_000_000 // world) for _ in range(world)]
    dist.barrier(group)
    before = node_of(group).stats()["sent_bytes"]
    match what:
        case "all_reduce":
            dist.all_reduce(whole, group=group)
        case "broadcast":
            dist.broadcast(whole, 3, group=group)
        case "reduce_scatter":
            dist.reduce_scatter(parts[0].clone(), parts, group=group)
        case "all_gather":
            dist.all_gather(parts, parts[rank].clone(), group=group)
    dist.barrier()
    taken = node_of(group).stats()["sent_bytes"] - before
    dist.destroy_process_group(group)
    return int(taken)


def dies(rank: int, world: int, culprit: int) -> tuple[str, int, float]:
    """One rank is killed in the middle of sums; what the others hear, whom it names, and after how long."""
    group = dist.new_group(backend="gradlane")
    data = torch.ones(4_000_000)
    dist.all_reduce(data, group=group)
    dist.barrier()  # the culprit's server has nothing more to return of the first sum
    began = time.monotonic()
    try:
        work = dist.all_reduce(data, group=group, async_op=True)
        if rank == culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
        for _ in range(1000):
            dist.all_reduce(data, group=group)
    except GradlaneError as error:
        return type(error).__name__, getattr(error, "rank", -1), time.monotonic() - began
    return "", -1, 0.0


def limited(rank: int, world: int) -> tuple[str, str]:
    """Rank 2, the first of its host, may make no file of a megabyte; what each rank hears before the first sum."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        dist.new_group(backend="gradlane", timeout=timedelta(seconds=20))
    except GradlaneError as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", ""


def differs(rank: int, world: int, sizes: list[int]) -> str:
    """What a rank hears of a sum to which ranks bring tensors of several sizes, which are cut into pieces."""
    group = dist.new_group(backend="gradlane", timeout=timedelta(seconds=20))
    try:
        dist.all_reduce(torch.ones(sizes[rank]), group=group)
    except GradlaneError as error:
        return type(error).__name__
    return ""


def session(rank: int, world: int, policy: str) -> list[str]:
    """Names whose bits differ between a session and DDP over the same kind of group."""
    group = dist.new_group(backend="gradlane")
    torch.manual_seed(7)
    net = MODELS["convolutions"]()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train(net, DistributedDataParallel(net, process_group=group), optimizer, net.batch, 6, rank)
    expected = bits_of(net, optimizer)
    torch.manual_seed(7)
    net = MODELS["convolutions"]()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    options: dict[str, Any] = {"backend": "all-reduce", "timeout": 30, "profile_iterations": 3}
    with gradlane.attach(net, optimizer, policy, process_group=group, **options) as attached:
        train(net, net, optimizer, net.batch, 6, rank)
        attached.flush()
        return differences(expected, bits_of(net, optimizer))


class Wide(nn.Module):
    """Layers of 1.5 MB and of 4 KB, so that messages go in several pieces between hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 6000), nn.Tanh(), nn.Linear(6000, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 64, generator=generator), torch.randint(16, (4,), generator=generator)


def _trained(policy: Any, rank: int, **options: Any) -> tuple[dict[str, torch.Tensor], Any, int]:
    """The bits after five steps of `Wide` in a session over servers; what a message passes; bytes that this node sent in
    the last step, whose gradients have 3.1 MB.
    """
    torch.manual_seed(7)
    net = Wide()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    name, knobs = policy if isinstance(policy, (list, tuple)) else (policy, {})
    options = {"backend": "server", "timeout": 30, "network": GIVEN, "profile_iterations": 1, "keep_log": True, **options}
    with gradlane.attach(net, optimizer, catalog.get(name, **knobs), **options) as session:
        backend: Any = session._driver._backend
        train(net, net, optimizer, net.batch, 4, rank)
        session.flush()
        dist.barrier()  # what this rank sends to others, they have
        before = backend._node.stats()["sent_bytes"]
        train(net, net, optimizer, net.batch, 1, rank)
        session.flush()
        dist.barrier()
        sent = backend._node.stats()["sent_bytes"] - before
        check_timeline(session.timeline(), session.plan)
        replay(session.dispatch_log())
        return bits_of(net, optimizer), backend.levels, sent


def sessions(rank: int, world: int, policies: list[Any], **options: Any) -> dict[str, tuple[str, list[str], Any, int]]:
    """For each policy a digest of the bits after five steps, the names that are not DDP's within rounding, what a message
    passes, and the bytes that this rank sent in the last step.
    """
    torch.manual_seed(7)
    net = Wide()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    wrapped = DistributedDataParallel(net)
    for steps in (4, 1):
        train(net, wrapped, optimizer, net.batch, steps, rank)
    expected, found = bits_of(net, optimizer), {}
    for policy in policies:
        bits, levels, sent = _trained(policy, rank, **options)
        far = [name for name, value in bits.items() if not torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6)]
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in bits.values())).hexdigest()
        found[str(policy)] = digest, far, levels, sent
    return found


def session_limited(rank: int, world: int, **options: Any) -> tuple[str, str]:
    """As `limited`, of a session."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        gradlane.attach(Wide(), timeout=20, **options)
    except GradlaneError as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", ""


def session_ends(rank: int, world: int, culprit: int, how: str) -> tuple[str, Any, float, bool]:
    """One rank is killed or stopped within a backward pass, when some sums are under way; what the others hear, whom it
    names, after how long, and whether their parameters are those of the last whole step.
    """
    net = Wide()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    generator, kept = torch.Generator().manual_seed(rank), {}
    last = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    # otherwise step() may update what has arrived, and whoever reads another parameter hears of the failure
    options: dict[str, Any] = {
        "backend": "server", "network": GIVEN, "timeout": 20, "stall_timeout": 2.5, "cross_barrier": False,
    }  # fmt: skip
    session = gradlane.attach(net, optimizer, "mercury", **options)
    answer, began = ("", -1, 0.0, False), time.monotonic()
    try:
        for step in range(100_000):
            x, y = net.batch(generator)
            optimizer.zero_grad()
            if rank == culprit and step == 10:
                net.layers[0].weight.register_hook(lambda _: os.kill(os.getpid(), last))
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            kept, began = bits_of(net, optimizer), time.monotonic()  # a rank may die before this one calls flush()
            session.flush()
    except GradlaneError as error:
        after_s = time.monotonic() - began
        now = {name: param.detach() for name, param in net.named_parameters()}
        is_whole = not differences({name: kept[name] for name in now}, now)
        answer = type(error).__name__, getattr(error, "rank", -1), after_s, is_whole
    with contextlib.suppress(GradlaneError):
        session.close()
    return answer


def main() -> None:
    """In the lab: rank 0 prints the bytes that the nodes of each host sent for an all_reduce of 4 MB."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (socket.gethostname(), sent(rank, world, "all_reduce")))
    if rank == 0:
        print(*(sum(bytes_ for name, bytes_ in found if name == host) for host in sorted({name for name, _ in found})))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
