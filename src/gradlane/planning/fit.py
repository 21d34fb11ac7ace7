"""From a sweep of measured all-reduces to a Network.

A least-squares line through such a sweep lets one stalled sample, or the largest size, decide everything, and may
come out with a negative startup. Here the error is relative and absolute (L1), so that each size counts alike and
an outlier counts at most once; startup and slope are bounded; and a second line, or a time that no message goes below, is
fitted only where one line clearly does not serve.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gradlane.core.fields import MAX_BYTES, MAX_NS
from gradlane.core.network import MAX_RATE, ONE_BY_ONE, CostSegment, Network, Sharing
from gradlane.errors import InputError
from gradlane.units import NS_PER_SECOND, format_bytes

Floats = npt.NDArray[np.float64]

# the fit compares each pair of sizes for each candidate break: a dense sweep is thinned to this many
MAX_SIZES = 96
# fewer sizes than this on a side and a line through two of them explains noise
LEAST_SIZES_PER_PIECE = 4
# sizes that must cost alike before their cost is what no message goes below, and sizes beyond them that make a line
LEAST_SIZES_ON_FLOOR, LEAST_SIZES_ABOVE = 2, 3
# the error per degree of freedom must come down to this part of one line's for a floor, or of either's for two lines ...
WORTH_A_FLOOR, WORTH_A_PIECE = 0.95, 0.6
# ... and lower it by this much, so that a one per cent error is not split into two of half a per cent
LEAST_GAIN = 0.01
# a cost may fall by this part where the next piece begins, beyond what the data themselves fall
TOLERATED_DROP = 0.02
# how finely the part of the startup that is latency is told: far finer than it can be measured
LATENCY_STEPS = 200
# the part of the smallest sizes' samples, of the slowest of them, that their mean leaves out
STALLED = 0.05

_LEAST_SLOPE = NS_PER_SECOND / MAX_RATE
_MOST_SLOPE = float(NS_PER_SECOND)


class _Line(NamedTuple):
    startup: float  # ns
    slope: float  # ns a byte
    error: float  # relative, of all points together

    def at(self, sizes: Floats) -> Floats:
        return self.startup + self.slope * sizes


class _Shape(NamedTuple):
    """What costs may look like, and how well that serves."""

    error: float  # per degree of freedom
    pieces: tuple[CostSegment, ...]
    least: float = 0.0  # ns; 0: nothing that no message goes below
    on_least: int = 0  # how many sizes, of the smallest, cost that


def fit_network(
    samples: Iterable[tuple[int, int]],
    workers: int,
    *,
    streams: Iterable[tuple[int, int, int]] = (),
    sharing: Sharing = ONE_BY_ONE,
    algorithm: str = "unstated",
    source: str = "measured",
) -> Network:
    """The network whose cost fits `samples`, pairs of (size in bytes, duration in ns), repeats included.

    Each size stands for itself by its median. One line startup + size / rate (MG-WFBP Eq. 10) is fitted by least
    relative absolute error under startup >= 0 and rate > 0; with a least cost, or two lines with a break between two sizes,
    when that lowers the error clearly. `residual` is the median over sizes of |fitted - measured| / measured. The result's
    `source` is `source` followed by what was fitted.

    streams: (size in bytes, number of messages, duration in ns) of equal messages started at once, on a network that is
    known to share itself as `sharing` says. What they save against as many messages alone tells how much of the startup is
    latency: one part for all pieces, and one of the least cost, again by least relative absolute error.

    Raises `InputError` for fewer than two different sizes, for sizes or durations that are not positive, and for a
    sample faster than any network.
    """
    by_size = _by_size(samples)
    count = sum(map(len, by_size.values()))
    sizes = np.array(sorted(by_size), dtype=np.float64)
    medians = np.array([np.median(by_size[size]) for size in sizes])
    in_streams = _stream_medians(streams)
    in_a_row = medians.copy()
    for (size_bytes, messages), duration_ns in in_streams.items():
        in_a_row[sizes == size_bytes] = duration_ns / messages
        # one after another they cannot cost less than together: where they seem to, some messages take much longer than
        # the median one, and a plan pays for those too
        medians[sizes == size_bytes] = np.maximum(medians[sizes == size_bytes], duration_ns / messages)
    kept = _thinned(sizes)
    shape = _shape(sizes[kept], medians[kept], in_a_row[kept])
    pieces, min_message_ns = shape.pieces, round(shape.least)
    if min_message_ns:
        # alone such a message wakes who sleeps: now and then that takes several times as long, and a plan pays for those too
        min_message_ns = max(
            min_message_ns, _mean([taken for size in sizes[kept][: shape.on_least] for taken in by_size[size]])
        )
    fitted = Network(workers, pieces, algorithm, min_message_ns=min_message_ns)
    costs = np.array([fitted.cost_ns(int(size)) for size in sizes], dtype=np.float64)
    residual = float(np.median(np.abs(costs - medians) / medians))
    fit = "one line" if len(pieces) == 1 else f"two lines that meet at {format_bytes(pieces[0].up_to_bytes)}"
    if min_message_ns:
        fit += " and a least cost"
    span = f"{count} samples of {len(sizes)} sizes, {format_bytes(int(sizes[0]))} to {format_bytes(int(sizes[-1]))}"
    described = f"{source}; {span}; {fit}" + (f"; streams of {len(in_streams)} kinds" if in_streams else "")
    network = Network(workers, pieces, algorithm, residual, described, sharing, min_message_ns)
    if not in_streams:
        return network
    small = {kind: taken for kind, taken in in_streams.items() if network.cost_ns(kind[0]) == min_message_ns}
    large = {kind: taken for kind, taken in in_streams.items() if kind not in small}
    return _fitting(_with_latency_of_least, _fitting(_with_latency, network, large), small)


def _stream_medians(streams: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], float]:
    """By size and number of messages the median duration."""
    by_kind: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (size_bytes, messages, duration_ns) in enumerate(streams):
        if not (0 < size_bytes <= MAX_BYTES and messages > 0 and 0 < duration_ns <= MAX_NS):
            raise InputError(
                f"streams[{index}]: got {messages} messages of {size_bytes} bytes in {duration_ns} ns, expected all above 0"
            )
        by_kind[size_bytes, messages].append(duration_ns)
    return {kind: float(np.median(durations)) for kind, durations in by_kind.items()}


def _fitting(
    candidate: Callable[[Network, int], Network], network: Network, in_streams: dict[tuple[int, int], float]
) -> Network:
    """Of the candidates made of `network`, from 0 to `LATENCY_STEPS`, the one that fits the streams best."""

    def error(network: Network) -> float:
        return sum(abs(network.stream_ns(*kind) / duration - 1) for kind, duration in in_streams.items())

    # the error has several minima, so that all are tried
    return min((candidate(network, step) for step in range(LATENCY_STEPS + 1)), key=error) if in_streams else network


def _with_latency(network: Network, step: int) -> Network:
    pieces = tuple(
        msgspec.structs.replace(piece, latency_ns=piece.startup_ns * step // LATENCY_STEPS) for piece in network.segments
    )
    return msgspec.structs.replace(network, segments=pieces)


def _with_latency_of_least(network: Network, step: int) -> Network:
    most_ns = (
        network.min_message_ns * (network.sharing.max_in_flight - 1) // network.sharing.max_in_flight
    )  # with so few at once no more shows
    return msgspec.structs.replace(network, min_message_latency_ns=most_ns * step // LATENCY_STEPS)


def _by_size(samples: Iterable[tuple[int, int]]) -> dict[float, list[float]]:
    """The durations of each size."""
    by_size: dict[float, list[float]] = defaultdict(list)
    for index, (size_bytes, duration_ns) in enumerate(samples):
        if not 0 < size_bytes <= MAX_BYTES:
            raise InputError(f"samples[{index}]: got a size of {size_bytes} bytes, expected 1 to {MAX_BYTES}")
        if not 0 < duration_ns <= MAX_NS:
            raise InputError(f"samples[{index}]: got a duration of {duration_ns} ns, expected more than 0 and at most {MAX_NS}")
        if size_bytes * NS_PER_SECOND > duration_ns * MAX_RATE:
            raise InputError(
                f"samples[{index}]: got {size_bytes} bytes in {duration_ns} ns, expected at most {MAX_RATE} bytes "
                "a second; was the operation waited for?"
            )
        by_size[size_bytes].append(duration_ns)
    if len(by_size) < 2:
        raise InputError(f"samples: got {len(by_size)} different sizes, expected 2 or more; measure a sweep of sizes")
    return by_size


def _mean(durations: list[float]) -> int:
    """But of the slowest few."""
    return round(float(np.mean(np.sort(durations)[: len(durations) - int(len(durations) * STALLED)])))


def _thinned(sizes: Floats) -> npt.NDArray[np.intp]:
    """Indices of at most MAX_SIZES sizes, evenly spread on a log scale, first and last among them."""
    if len(sizes) <= MAX_SIZES:
        return np.arange(len(sizes))
    logs = np.log(sizes)
    wanted = np.linspace(logs[0], logs[-1], MAX_SIZES)
    right = np.clip(np.searchsorted(logs, wanted), 1, len(logs) - 1)
    nearest = np.where(wanted - logs[right - 1] < logs[right] - wanted, right - 1, right)
    return np.unique(nearest)


def _line(sizes: Floats, medians: Floats) -> _Line:
    """The bounded line of least total relative absolute error.

    Such a line passes through a data point. Through a given point the error is convex in the slope, and least at
    the weighted median of the slopes to the other points, so the bounds are met by clipping. All points are tried
    at once: exact, O(n^2 log n).
    """
    count = len(sizes)
    run = sizes[None, :] - sizes[:, None]
    rise = medians[None, :] - medians[:, None]
    np.fill_diagonal(run, 1.0)
    slopes = rise / run
    weights = np.abs(run) / medians[None, :]
    np.fill_diagonal(weights, 0.0)
    order = np.argsort(slopes, axis=1)
    below = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1)
    middle = np.argmax(below >= below[:, -1:] / 2, axis=1)
    rows = np.arange(count)
    slope = np.clip(slopes[rows, order[rows, middle]], _LEAST_SLOPE, _MOST_SLOPE)
    # not negative: no sample is faster than MAX_RATE
    slope = np.minimum(slope, medians / sizes)
    startup = medians - slope * sizes
    errors = np.sum(np.abs(startup[:, None] + slope[:, None] * sizes[None, :] - medians[None, :]) / medians[None, :], axis=1)
    best = int(np.argmin(errors))
    return _Line(float(startup[best]), float(slope[best]), float(errors[best]))


def _shape(sizes: Floats, medians: Floats, in_a_row: Floats) -> _Shape:
    """One line, unless a least cost beside it or two lines serve clearly better."""
    line = _line(sizes, medians)
    best = _Shape(line.error / max(1, len(sizes) - 2), (_piece(line),))
    for other, part in (
        (_line_and_floor(sizes, medians, in_a_row), WORTH_A_FLOOR),
        (_two_lines(sizes, medians), WORTH_A_PIECE),
    ):
        if other is not None and _is_worth(other.error, best.error, part):
            best = other
    return best


def _is_worth(error: float, simpler: float, part: float) -> bool:
    return error <= part * simpler and simpler - error >= LEAST_GAIN


def _line_and_floor(sizes: Floats, medians: Floats, in_a_row: Floats) -> _Shape | None:
    """The smallest sizes, as many as serves best, cost the median of what they cost `in_a_row`; the line is the others'."""
    count = len(sizes)
    best: _Shape | None = None
    for split in range(LEAST_SIZES_ON_FLOOR, count - LEAST_SIZES_ABOVE + 1):
        floor = float(np.median(in_a_row[:split]))
        line = _line(sizes[split:], medians[split:])
        seen = np.concatenate((in_a_row[:split], medians[split:]))
        # three numbers are chosen: a line and a floor, which ends where the line goes above it
        error = float(np.sum(np.abs(np.maximum(floor, line.at(sizes)) - seen) / seen)) / (count - 3)
        if best is None or error < best.error:
            best = _Shape(error, (_piece(line),), floor, split)
    return best


def _two_lines(sizes: Floats, medians: Floats) -> _Shape | None:
    count = len(sizes)
    best: _Shape | None = None
    for split in range(LEAST_SIZES_PER_PIECE, count - LEAST_SIZES_PER_PIECE + 1):
        left = _line(sizes[:split], medians[:split])
        right = _line(sizes[split:], medians[split:])
        # five numbers are chosen: two lines and the break
        error = (left.error + right.error) / max(1, count - 5)
        if best is not None and error >= best.error:
            continue
        at = _break_at(left, right, sizes[split - 1 : split + 1], medians[split - 1 : split + 1])
        if at is not None:
            best = _Shape(error, (_piece(left, at), _piece(right)))
    return best


def _break_at(left: _Line, right: _Line, sizes: Floats, medians: Floats) -> int | None:
    """Where between two neighbouring sizes the left line should end, or None if the cost would fall there
    although the data do not.
    """
    gap = right.at(sizes) - left.at(sizes)
    if gap[0] * gap[1] < 0:
        crossing = float(sizes[0] + (sizes[1] - sizes[0]) * gap[0] / (gap[0] - gap[1]))
        return int(min(max(crossing, sizes[0]), sizes[1] - 1))
    fall = max(0.0, 1 - medians[1] / medians[0]) + TOLERATED_DROP
    if gap[0] < -fall * left.at(sizes)[0]:
        return None
    return int(sizes[0])


def _piece(line: _Line, up_to_bytes: int = MAX_BYTES) -> CostSegment:
    rate = NS_PER_SECOND / line.slope if line.slope > 0 else math.inf
    return CostSegment(min(round(line.startup), MAX_NS), round(min(max(rate, 1.0), float(MAX_RATE))), up_to_bytes)
