"""How late the choice of the next packet is: an urgent tensor behind 64 MB that are under way, on shaped links.

    python -m bench.preemption

For each rate, order and size of what the kernel may hold unsent (and of its send buffer): seconds of the urgent tensor
alone, behind the large one, and of the large one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tests" / "transport" / "preemption.py"
RATES = ("200mbit", "1gbit")
BUFFERS = ((16, 0), (32, 0), (64, 0), (128, 0), (32, 256), (64, 512))  # KiB: unsent, send buffer (0: the kernel's)


def measured(rate: str, order: str, large: int, small: int, unsent: int, buffer: int) -> dict[str, float]:
    arguments = [order, *map(str, (large, small, unsent, buffer))]
    command = [sys.executable, "-m", "gradlane", "lab", "--quiet", "--hosts", "2", "--link", rate, "--"]
    done = subprocess.run([*command, sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1].removeprefix("[1] "))


def main() -> None:
    print(
        f"{'link':>8} {'order':>9} {'unsent':>8} {'buffer':>8} {'alone ms':>9} {'urgent ms':>10} {'worst ms':>9} {'64 MB s':>8}"
    )
    for rate in RATES:
        runs = [("fifo", 128, 0), *(("priority", *buffers) for buffers in BUFFERS)]
        for order, unsent, buffer in runs:
            got = measured(rate, order, 64 << 20, 64 << 10, unsent << 10, buffer << 10)
            times = (
                f"{got['alone_s'] * 1e3:9.2f} {got['urgent_s'] * 1e3:10.2f} {got['worst_s'] * 1e3:9.2f} {got['large_s']:8.3f}"
            )
            print(f"{rate:>8} {order:>9} {unsent:>7}K {f'{buffer}K' if buffer else 'kernel':>8} {times}", flush=True)


if __name__ == "__main__":
    main()
