"""Sessions that train for long: memory and descriptors of each rank, after a tenth of the iterations and at the end.

python -m bench.session_soak                        20,000 iterations of each arm, two ranks on loopback
python -m bench.session_soak --iterations 2000
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from tests.live.ranks import Ranks
from tests.processes import descriptors, resident_bytes

LIMIT_S = 1800.0
ARMS = (("bytescheduler", "all-reduce"), ("mercury", "server"), ("auto", None))


def soak(rank: int, world: int, policy: str, backend: Any, iterations: int) -> dict[str, Any]:
    """On each rank: train, and measure before and after nine tenths of it."""
    import torch

    import gradlane
    from tests.live.loops import Mlp, momentum
    from tests.live.tuned import step

    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    with gradlane.attach(model, optimizer, policy, backend=backend) as session:
        for _ in range(iterations // 10):
            step(model, model.batch, optimizer, generator)
        session.flush()
        before, open_before, began = resident_bytes(), descriptors(), time.monotonic()
        for _ in range(iterations - iterations // 10):
            step(model, model.batch, optimizer, generator)
        session.flush()
        took_s = time.monotonic() - began
        return {"before": before, "after": resident_bytes(), "open": (open_before, descriptors()), "seconds": took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20_000)
    iterations = parser.parse_args().iterations
    ranks = Ranks(2)
    for policy, backend in ARMS:
        arm = {"policy": policy, "backend": backend, "iterations": iterations}
        for rank, answer in enumerate(ranks.answers("bench.session_soak:soak", LIMIT_S, lambda _: None, **arm)):
            assert answer is not None, f"no answer of rank {rank} within {LIMIT_S:.0f} s"
            ok, each = answer
            assert ok, each
            slope = (each["after"] - each["before"]) / (iterations - iterations // 10)
            (first, last), (fewer, more) = (each["before"] / 1e6, each["after"] / 1e6), each["open"]
            print(
                f"{policy} over {backend or 'both'}, rank {rank}: resident {first:.1f} -> {last:.1f} MB, {slope:.1f} bytes an "
                f"iteration; descriptors {fewer} -> {more}; {each['seconds']:.0f} s",
                flush=True,
            )
    ranks.close()


if __name__ == "__main__":
    main()
