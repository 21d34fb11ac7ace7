"""How fast gradients come to CPU memory and sums go back: `python -m bench.device.bus CONFIG.json`.

As a session stages them, tensor by tensor, beside a plain copy of as many bytes between the device and pinned memory.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from bench.device.lines import Lines
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.staging import Staging
from gradlane.live.backends.streams import DeviceStreams

SIZES = (("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("16 MiB", 16 << 20))
TURNS = 7


class Config(msgspec.Struct, frozen=True):
    """What the parent asks for. total_mib: bytes that are copied in a turn."""

    out: str
    total_mib: int
    dry: bool


def _rates(size_bytes: int, total_bytes: int, dry: bool) -> dict[str, float]:
    """Bytes a second, in GB/s, by what copied: staging or a plain copy, down or up."""
    device = torch.device("cpu" if dry else "cuda")
    count = max(1, total_bytes // size_bytes)
    params = [nn.Parameter(torch.zeros(size_bytes // 4, device=device)) for _ in range(count)]
    slots: Any = GradientBuffers(params)
    streams: Any = _streams(device)
    staging: Any = Staging(streams)
    every = list(range(count))
    host = streams.host_memory(slots.range_of(0, count - 1))
    flat = slots.range_of(0, count - 1)
    moved = flat.numel() * flat.element_size()

    def down() -> None:
        """As a backward pass does: one tensor after the other, and it is over when the host was told of the last."""
        is_down = threading.Event()
        for tensor in every:
            staging.bring_down([tensor], (lambda error: is_down.set()) if tensor == count - 1 else (lambda error: None))
        assert is_down.wait(30), "no copy down ended within 30 s"

    def up() -> None:
        for tensor in every:
            staging.bring_up([tensor])

    arms: dict[str, Callable[[], Any]] = {
        "staged down": down,
        "staged up": up,
        "plain down": lambda: host.copy_(flat, non_blocking=True),
        "plain up": lambda: flat.copy_(host, non_blocking=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in arms}
    try:
        staging.take_up(params, slots)
        for turn in range(TURNS):
            staging.begin()
            for name, call in arms.items():
                _synchronize(device)
                began = time.perf_counter()
                call()
                _synchronize(device)
                if turn > 1:
                    taken[name].append(time.perf_counter() - began)
    finally:
        staging.close()
    return {name: moved / statistics.median(seconds) / 1e9 for name, seconds in taken.items()}


def _streams(device: torch.device) -> Any:
    if device.type == "cpu":
        from gradlane.testing.streams import CheckedStreams

        return CheckedStreams(late=False)
    return DeviceStreams(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    lines = Lines(Path(config.out))
    try:
        for name, size in SIZES:
            lines.add(
                "bus", tensor=name, megabytes=config.total_mib * 1.048576, **_rates(size, config.total_mib << 20, config.dry)
            )
    except Exception:
        lines.add("error", part="bus", text=traceback.format_exc(limit=-6))
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
