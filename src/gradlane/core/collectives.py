"""The cost of all-reduce by algorithm, from the cost of a single transfer (MG-WFBP Table 2).

The table gives startup a and time per byte b of five algorithms from alpha (startup between two
nodes), beta (time per byte between them), gamma (time to sum a byte) and the number of workers N.
docs/cost-model.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from gradlane.core.fields import MAX_NS, need_int
from gradlane.core.network import MAX_RATE, MAX_WORKERS, CostSegment, Network
from gradlane.errors import InputError

# (workers, steps of a tree over them, beta, gamma) -> (startups, time per byte)
_Cost = Callable[[int, int, Fraction, Fraction], tuple[int, Fraction]]

_TABLE_2: dict[str, _Cost] = {
    "binary-tree": lambda n, log, beta, gamma: (2 * log, (2 * beta + gamma) * log),
    "recursive-doubling": lambda n, log, beta, gamma: (log, (beta + gamma) * log),
    "halving-doubling": lambda n, log, beta, gamma: (2 * log, 2 * beta - (2 * beta + gamma) / n + gamma),
    "double-binary-trees": lambda n, log, beta, gamma: (2 * log, beta + gamma),
    "ring": lambda n, log, beta, gamma: (2 * (n - 1), Fraction(n - 1, n) * (2 * beta + gamma)),
}

ALGORITHMS = tuple(_TABLE_2)


def all_reduce(
    algorithm: str, workers: int, *, startup_ns: int, bytes_per_second: int, sum_bytes_per_second: int | None = None
) -> Network:
    """The cost of all-reduce by one of `ALGORITHMS` (MG-WFBP Table 2).

    log2 N is rounded up where N is not a power of two. The table prints the double binary trees'
    startup as 2 log N, without alpha; here it is multiplied by alpha. One worker alone sends
    nothing.

    Args:
        algorithm: one of `ALGORITHMS`.
        workers: N.
        startup_ns: alpha, of one transfer between two workers.
        bytes_per_second: 1 / beta, of that transfer.
        sum_bytes_per_second: 1 / gamma. None: summing takes no time.

    Returns:
        A network of one segment.

    Raises:
        InputError: an unknown algorithm, or an argument out of its range.
    """
    if algorithm not in _TABLE_2:
        raise InputError(f"algorithm: got {algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
    need_int("workers", workers, 1, MAX_WORKERS)
    need_int("startup_ns", startup_ns, 0, MAX_NS)
    need_int("bytes_per_second", bytes_per_second, 1, MAX_RATE)
    if sum_bytes_per_second is not None:
        need_int("sum_bytes_per_second", sum_bytes_per_second, 1, 10**18)
    source = f"MG-WFBP Table 2, alpha {startup_ns} ns, 1/beta {bytes_per_second} B/s, 1/gamma {sum_bytes_per_second} B/s"
    if workers == 1:
        return Network(1, (CostSegment(0, MAX_RATE),), algorithm, source=source)
    beta = Fraction(1, bytes_per_second)
    gamma = Fraction(0) if sum_bytes_per_second is None else Fraction(1, sum_bytes_per_second)
    startups, seconds_per_byte = _TABLE_2[algorithm](workers, (workers - 1).bit_length(), beta, gamma)
    rate = min(max(int(1 / seconds_per_byte), 1), MAX_RATE)
    return Network(workers, (CostSegment(startups * startup_ns, rate),), algorithm, source=source)
