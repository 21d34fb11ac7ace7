"""The cost of all-reduce by algorithm, from the cost of a single transfer (MG-WFBP Table 2).

In an all-reduce among N workers some worker sends at least 2 (N - 1) / N of a message: its parts for the others' sums, and its
own sums for the others. The table's row for double binary trees is below that, although each worker sends every byte up one
tree and down the other; it is kept for the paper's figures.

The table gives startup a and time per byte b of five algorithms. Its symbols are alpha (startup between two nodes),
beta (time per byte between them), gamma (time to sum a byte) and the number of workers N. docs/cost-model.md has the
formulas. `flat_ring` is a ring through all devices of hosts that have several.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from gradlane.core.bus import Bus
from gradlane.core.fields import MAX_NAME, MAX_NS, MAX_RATE, need_int
from gradlane.core.network import MAX_WORKERS, CostSegment, Network
from gradlane.errors import InputError

# (workers, steps of a tree over them, beta, gamma) -> (startups, time per byte)
_Cost = Callable[[int, int, Fraction, Fraction], tuple[int, Fraction]]

_TABLE_2: dict[str, _Cost] = {
    "binary-tree": lambda n, log, beta, gamma: (2 * log, (2 * beta + gamma) * log),
    "recursive-doubling": lambda n, log, beta, gamma: (log, (beta + gamma) * log),
    "halving-doubling": lambda n, log, beta, gamma: (2 * log, 2 * beta - (2 * beta + gamma) / n + gamma),
    "double-binary-trees": lambda n, log, beta, gamma: (2 * log, 2 * beta + gamma),
    "ring": lambda n, log, beta, gamma: (2 * (n - 1), Fraction(n - 1, n) * (2 * beta + gamma)),
}

_AS_PRINTED: dict[str, _Cost] = {"double-binary-trees": lambda n, log, beta, gamma: (2 * log, beta + gamma)}

ALGORITHMS = tuple(_TABLE_2)


def all_reduce(
    algorithm: str,
    workers: int,
    *,
    startup_ns: int,
    bytes_per_second: int,
    sum_bytes_per_second: int | None = None,
    as_printed: bool = False,
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
        as_printed: the paper's own row, to compare with its figures: double binary trees at beta + gamma a
            byte, half of what they send. Otherwise they cost 2 beta + gamma.

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
    table = "MG-WFBP Table 2"
    if algorithm in _AS_PRINTED and not as_printed:
        table += " with 2 beta for beta, which trees send"
    source = f"{table}, alpha {startup_ns} ns, 1/beta {bytes_per_second} B/s, 1/gamma {sum_bytes_per_second} B/s"
    if workers == 1:
        return Network(1, (CostSegment(0, MAX_RATE),), algorithm, source=source)
    beta = Fraction(1, bytes_per_second)
    gamma = Fraction(0) if sum_bytes_per_second is None else Fraction(1, sum_bytes_per_second)
    row = _AS_PRINTED.get(algorithm, _TABLE_2[algorithm]) if as_printed else _TABLE_2[algorithm]
    startups, seconds_per_byte = row(workers, (workers - 1).bit_length(), beta, gamma)
    assert as_printed or seconds_per_byte >= Fraction(2 * (workers - 1), workers) * beta, f"{algorithm} sends too few bytes"
    rate = min(max(int(1 / seconds_per_byte), 1), MAX_RATE)
    return Network(workers, (CostSegment(startups * startup_ns, rate),), algorithm, source=source)


def flat_ring(hosts: int, bus: Bus, *, startup_ns: int, bytes_per_second: int, crossings: int = 1) -> Network:
    """The cost of all-reduce by one ring through all devices of all hosts.

    Each device sends 2 (N - 1) / N of a message to the next one, N being the number of devices. The ring's order
    decides how often it leaves a host: once, if it visits all devices of a host before the next host. If it visits
    one device of each host in turns, as often as a host has devices. So many of these transfers share the host's
    card. The slowest transfer determines the rate, and all steps on a message's way the startup.

    Args:
        hosts: 1 or more.
        bus: the devices of a host, and what a transfer between two of them costs.
        startup_ns, bytes_per_second: of a transfer from host to host, as in `all_reduce`.
        crossings: how often the ring leaves each host, 1 to the number of its devices.

    Returns:
        A network of one segment and no bus.

    Raises:
        InputError: an argument is out of its range.
    """
    need_int("hosts", hosts, 1, MAX_WORKERS // bus.devices)
    need_int("startup_ns", startup_ns, 0, MAX_NS)
    need_int("bytes_per_second", bytes_per_second, 1, MAX_RATE)
    need_int("crossings", crossings, 1, bus.devices)
    workers = hosts * bus.devices
    outside, rates = 0, []
    if hosts > 1:
        # the last piece to arrive has passed nearly twice around; it lacks two steps, within hosts if there are any
        outside = min(2 * crossings * hosts, 2 * (workers - 1))
        rates.append(bytes_per_second // crossings)
    inside = 2 * (workers - 1) - outside
    if inside:
        rates.append(bus.bytes_per_second)
    rate = max(1, min(rates)) * workers // (2 * (workers - 1))
    segment = CostSegment(outside * startup_ns + inside * bus.startup_ns, min(max(rate, 1), MAX_RATE))
    source = (
        f"a ring that leaves each of {hosts} hosts {crossings} times, {startup_ns} ns, {bytes_per_second} B/s; {bus.source}"
    )
    return Network(workers, (segment,), "ring", source=source[:MAX_NAME])
