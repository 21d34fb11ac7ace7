"""How long second phases wait for norms behind the last first phase: computed in batches, and all at the end, in turns.

    python -m bench.norms [MODEL]

Rank 0 of two, without a network. First phases end one after another, as fast as norms are computed.
"""

from __future__ import annotations

import sys
import time
from unittest.mock import patch

import torch

from bench.versions import ratio, spread
from gradlane import zoo
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.live.backends import norms as told_norms
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.norms import Norms, NormsExchange
from gradlane.planning import catalog
from gradlane.planning.plans import make_plan

TURNS = 31
FACTORS = {"of sums": 1.0, "of sums and of multiplied ones": 0.5**16}


def main(name: str) -> None:
    torch.set_num_threads(1)
    profile = zoo.profile(name)
    plan = make_plan(catalog.get("owners"), profile, Place(Network.line(2, 10_000, 10**9)))
    slots = GradientBuffers([torch.nn.Parameter(torch.empty(spec.size_bytes // 4)) for spec in profile.specs])
    for slot in slots.slots:
        slot.normal_()
    norms = Norms(plan, slots.message_buffers(plan), 0, 2)
    exchange = NormsExchange(norms, lambda memory, then: then(None))
    owned_bytes = sum(profile.specs[tensor].size_bytes for tensors in norms.owned for tensor in tensors)
    print(f"{name}: rank 0 owns {owned_bytes / 2**20:.0f} MiB in {len(plan.messages)} messages")
    for what, factor in FACTORS.items():
        times: dict[str, list[float]] = {"at the end": [], "in batches": []}
        for _ in range(TURNS):
            for arm, batch_bytes in {"at the end": 2**60, "in batches": told_norms._BATCH_BYTES}.items():
                with patch.object(told_norms, "_BATCH_BYTES", batch_bytes):
                    times[arm].append(_waits_ms(norms, exchange, factor))
        at_end, in_batches = times["at the end"], times["in batches"]
        print(f"  norms {what}: at the end {spread(at_end)} ms, in batches {spread(in_batches)}, {ratio(in_batches, at_end)}")


def _waits_ms(norms: Norms, exchange: NormsExchange, factor: float) -> float:
    """From the end of the last first phase until the norms are told."""
    norms.next_factor = factor
    norms.begin()
    told_at: list[float] = []
    ended = exchange.once_there(lambda message, error: told_at.append(time.perf_counter()))
    began = 0.0
    for message in range(len(norms.owned)):
        began = time.perf_counter()
        ended(message, None)
    return (told_at[-1] - began) * 1e3


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "bert-base")
