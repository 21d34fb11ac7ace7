"""What ranks run whose gradients travel as halves: training beside DDP with torch's hooks, and sums of known numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.core.network import Network
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import GradlaneError
from gradlane.planning import catalog
from tests.live.cases import bits_of, differences
from tests.live.models import MODELS, OPTIMIZERS
from tests.live.networks import counting_deferred_updates, slow_network
from tests.live.streams import streams_on_the_host


def fp16_hook(bucket: dist.GradBucket) -> Any:
    """As torch's fp16_compress_hook, but for the order: it divides before it rounds.

    Torch's rounds twice what is subnormal, which is some gradients of any model.
    """
    halves = bucket.buffer().div_(dist.get_world_size()).to(torch.float16)
    work = dist.all_reduce(halves, async_op=True)
    assert work is not None
    return work.get_future().then(lambda ended: bucket.buffer().copy_(ended.value()[0]))


# lambdas, since torch compares a hook's annotations, and takes the first by its own name on no CPU, where it works too
HOOKS = {
    "bfloat16": lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
    "float16": lambda state, bucket: fp16_hook(bucket),
}
OVERFLOWS = 5  # the step whose loss is too large for float16


def train(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, steps: int, rank: int, scaled: bool) -> list[float]:
    """Train; if `scaled`, with a GradScaler, which sees an overflow, and with clipping. Returns the scaler's scales."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    generator = torch.Generator().manual_seed(1000 + rank)
    scales = []
    for step in range(steps):
        x, y = model.batch(generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(x), y) * (1e7 if scaled and step == OVERFLOWS else 1.0)
        scaler.scale(loss).backward()
        if scaled:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def equals_the_hook(
    rank: int, world: int, wire_dtype: str, policies: list[Any], backend: Any = None, model: str = "convolutions",
    optimizer: str = "sgd", steps: int = 14, late: bool = False, streams: bool = False, **options: Any,
) -> tuple[dict[str, list[str]], list[float], int]:  # fmt: skip
    """For each policy what differs from DDP with such a hook; the scales of DDP's run; how many updates were deferred.

    late: sums arrive after `step()`. streams: the CPU is taken for a device with streams.
    """
    scaled = wire_dtype == "float16"
    torch.manual_seed(7)
    net = MODELS[model]()
    opt = OPTIMIZERS[optimizer](net.parameters())
    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(None, HOOKS[wire_dtype])
    scales = train(net, wrapped, opt, steps, rank, scaled)
    reference = bits_of(net, opt)
    found = {}
    with contextlib.ExitStack() as stack:
        deferred = stack.enter_context(counting_deferred_updates())
        if late:
            stack.enter_context(slow_network())
        if streams:
            stack.enter_context(streams_on_the_host(late=False))
        for policy in policies:
            torch.manual_seed(7 + rank)
            net = MODELS[model]()
            opt = OPTIMIZERS[optimizer](net.parameters())
            name, knobs = policy if isinstance(policy, (list, tuple)) else (policy, {})
            chosen = name if name == "auto" else catalog.get(name, **knobs)
            options = {"timeout": 30, "backend": backend, "wire_dtype": wire_dtype, **options}
            with gradlane.attach(net, opt, chosen, **options) as session:
                assert train(net, net, opt, steps, rank, scaled) == scales
                session.flush()
                assert session.settled
                assert {spec.dtype for spec in session.plan.tensors} == {wire_dtype}
                found[str(policy)] = differences(reference, bits_of(net, opt))
    return found, scales, sum(deferred)


class Known(nn.Module):
    """Parameters of three dtypes, whose gradients are what the last call was given. The loss is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(5000))
        self.widest = nn.Parameter(torch.zeros(300, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
        self.small = nn.Parameter(torch.zeros(3))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        products = [(param * gradients[name]).sum().double() for name, param in self.named_parameters()]
        return torch.stack(products).sum()


def sums(rank: int, world: int, backend: str, wire_dtype: str, verify: bool = False) -> dict[str, Any]:
    """By parameter: the largest error of its gradient, as a part of what the rounding of halves permits where each part is
    rounded once and the sum once; beside it the dtypes that travelled.
    """
    model = Known()
    generator = torch.Generator().manual_seed(5)
    everybodys = [
        {name: torch.randn(param.shape, generator=generator).to(param.dtype) for name, param in model.named_parameters()}
        for _ in range(world)
    ]
    # as one of a float32 model, whose sizes attach converts
    specs = [TensorSpec("wide", 20000), TensorSpec("widest", 2400, "float64"), TensorSpec("narrow", 600, "bfloat16")]
    tensors = tuple(TensorProfile(spec, 0, 0) for spec in (*specs, TensorSpec("small", 12)))
    profile = Profile("Known", "cpu", tensors, (Layer("all", 1000),), 1000)
    policy = catalog.get("bytescheduler", partition_bytes=4096, credit_bytes=8192)
    options: dict[str, Any] = {"network": Network.line(world, 20_000, 10**9), "profile": profile, "verify": verify}
    found: dict[str, Any] = {}
    unit = torch.finfo(getattr(torch, wire_dtype)).eps / 2
    with gradlane.attach(model, None, policy, backend=backend, wire_dtype=wire_dtype, timeout=30, **options) as session:
        for _ in range(3):
            model.zero_grad()
            model(everybodys[rank]).backward()
            for name, param in model.named_parameters():
                all_parts = torch.stack([each[name].double() for each in everybodys]) / world
                exact, parts = all_parts.sum(0), all_parts.abs().sum(0)
                assert param.grad is not None
                permitted = unit * (parts + exact.abs()) * (1 + unit) + 1e-7 * parts
                found[name] = max(found.get(name, 0.0), float(((param.grad.double() - exact).abs() / permitted).max()))
        found["dtypes"] = {spec.name: spec.dtype for spec in session.plan.tensors}
        found["profile"] = [each.spec.dtype for each in session.profile().tensors]
    return found


def refused(rank: int, world: int, of_each: list[Any], **options: Any) -> tuple[str, str]:
    """What `attach` raises where each rank asks for another wire dtype."""
    model = MODELS["convolutions"]()
    try:
        gradlane.attach(model, None, "wfbp", wire_dtype=of_each[rank], timeout=20, **options).close()
    except GradlaneError as error:
        return type(error).__name__, str(error)
    return "nothing", ""
