"""What float32 gradients lose, and what time they save, where they travel as bfloat16 or float16.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m bench.halves
    gradlane lab --hosts 2 --link 1gbit -- python -m bench.halves

Every rank draws gradients from a normal distribution. Each backend averages them, in float32 and as halves in turns, under
its default policy. Rank 0 prints by how much the averages differ from those of float64: the root mean square and the largest
difference, both as parts of the averages' root mean square. Beside it stands the time from the backward pass to the last sum.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.backends import BackendName
from gradlane.core.network import Network
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec

LAYERS, ELEMENTS = 8, 1 << 19
TURNS, WARM, COUNTED = 3, 2, 5
POLICIES: dict[BackendName, str] = {"all-reduce": "blocks", "server": "mercury"}


class Drawn(nn.Module):
    """Layers whose gradients are what was drawn."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(ELEMENTS) for _ in gradients)
        self._gradients = gradients

    def forward(self) -> torch.Tensor:
        products = [(layer * drawn).sum() for layer, drawn in zip(self.layers, self._gradients, strict=True)]
        return torch.stack(products).sum()


def turn(model: Drawn, backend: BackendName, wire_dtype: str | None) -> list[float]:
    """The counted iterations' times, in s, of the slowest rank. Leaves the averages in `.grad`."""
    network = Network.line(dist.get_world_size(), startup_ns=100_000, bytes_per_second=125_000_000)
    names = [name for name, _ in model.named_parameters()][::-1]
    tensors = tuple(TensorProfile(TensorSpec(name, 4 * ELEMENTS), 0, index) for index, name in enumerate(names))
    profile = Profile("drawn", "cpu", tensors, tuple(Layer(name, 1000) for name in names), 1000)
    taken = []
    with gradlane.attach(
        model, None, POLICIES[backend], backend=backend, wire_dtype=wire_dtype, network=network, profile=profile
    ) as session:
        for step in range(WARM + COUNTED):
            model.zero_grad()
            loss = model()
            dist.barrier()
            began = time.perf_counter()
            loss.backward()
            session.flush()
            slowest = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if step >= WARM:
                taken.append(float(slowest))
    return taken


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(ELEMENTS, generator=generator) for _ in range(LAYERS)]
    exact = [each.double() for each in drawn]
    for each in exact:
        dist.all_reduce(each)
        each /= world
    model = Drawn(drawn)
    arms = [(backend, wire_dtype) for backend in POLICIES for wire_dtype in (None, "bfloat16", "float16")]
    times: dict[tuple[BackendName, str | None], list[float]] = {arm: [] for arm in arms}
    errors: dict[tuple[BackendName, str | None], torch.Tensor] = {}
    for _ in range(TURNS):
        for arm in arms:
            times[arm] += turn(model, *arm)
            averages = [layer.grad.double() for layer in model.layers if layer.grad is not None]
            errors[arm] = torch.cat([mine - right for mine, right in zip(averages, exact, strict=True)])
    if rank == 0:
        scale = float(torch.cat(exact).square().mean().sqrt())
        print(f"{world} ranks, {4 * LAYERS * ELEMENTS >> 20} MiB of float32 gradients, {TURNS} turns of {COUNTED} iterations")
        print(f"{'backend':>10} {'wire':>9} {'rms error':>10} {'max error':>10}  ms (p10..p90)")
        for arm in arms:
            low, *_, high = statistics.quantiles(times[arm], n=10)
            rms, most = float(errors[arm].square().mean().sqrt()) / scale, float(errors[arm].abs().max()) / scale
            median = statistics.median(times[arm])
            spread = f"{median * 1e3:.0f} ({low * 1e3:.0f}..{high * 1e3:.0f})"
            print(f"{arm[0]:>10} {arm[1] or 'float32':>9} {rms:10.1e} {most:10.1e}  {spread}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
