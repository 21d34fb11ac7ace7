"""Fit a Network to a sweep of measured all-reduces.

A least-squares line lets one stalled sample, or the largest size, decide everything, and may have a
negative startup. Here the error is relative and absolute (L1): each size weighs the same, and an
outlier at most once. Startup and slope are bounded. A second line, or a minimum cost, is fitted
only if it lowers the error clearly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gradlane.core.bus import Bus
from gradlane.core.fields import MAX_BYTES, MAX_NS, MAX_RATE
from gradlane.core.network import ONE_BY_ONE, CostSegment, Network, Sharing
from gradlane.errors import InputError
from gradlane.units import NS_PER_SECOND, format_bytes

Floats = npt.NDArray[np.float64]

# the fit compares each pair of sizes for each candidate break, so it thins a dense sweep to this
# many sizes
MAX_SIZES = 96
# a line through fewer sizes than this would fit noise
LEAST_SIZES_PER_PIECE = 4
# how many of the smallest sizes must cost the same for a minimum cost, and how many larger ones
# make a line
LEAST_SIZES_ON_FLOOR, LEAST_SIZES_ABOVE = 2, 3
# a minimum must lower the error per degree of freedom to this fraction of one line's, two lines to
# this of the better's ...
WORTH_A_FLOOR, WORTH_A_PIECE = 0.95, 0.6
# ... and by at least this much, so that an error of 1 % is not reason for a second line
LEAST_GAIN = 0.01
# the cost may fall by this fraction at the start of the next segment, beyond what the data fall by
TOLERATED_DROP = 0.02
# candidates for the latency's part of a startup: far finer than it can be measured
LATENCY_STEPS = 200
# from this part of a startup on there is next to no overhead left that a stream could do without
ALL_LATENCY = 0.9
# the minimum cost is a mean without this fraction of the samples, the slowest
STALLED = 0.05

_LEAST_SLOPE = NS_PER_SECOND / MAX_RATE
_MOST_SLOPE = float(NS_PER_SECOND)


class _Line(NamedTuple):
    startup: float  # ns
    slope: float  # ns a byte
    error: float  # sum over points of the relative absolute error

    def at(self, sizes: Floats) -> Floats:
        return self.startup + self.slope * sizes


class _Shape(NamedTuple):
    """A candidate for the cost function, with its error."""

    error: float  # per degree of freedom
    segments: tuple[CostSegment, ...]
    least: float = 0.0  # ns; 0: no minimum
    on_least: int = 0  # how many of the smallest sizes cost that


def fit_network(
    samples: Iterable[tuple[int, int]],
    workers: int,
    *,
    streams: Iterable[tuple[int, int, int]] = (),
    sharing: Sharing = ONE_BY_ONE,
    algorithm: str = "unstated",
    source: str = "measured",
) -> Network:
    """Fit a network to measured all-reduces.

    Each size counts with its median duration. One line startup + size / rate (MG-WFBP Eq. 10) is
    fitted by least relative absolute error, with startup >= 0 and rate > 0. A minimum cost, or two
    lines that meet between two sizes, replace it if they lower the error clearly.

    Args:
        samples: pairs of size in bytes and duration in ns; sizes may repeat.
        workers: number of workers that measured.
        streams: triples of size in bytes, number of messages and duration in ns, of equal messages
            that started together. What they save against as many lone messages tells how much of
            the startups, and of the minimum, is latency; both are fitted by least relative absolute
            error. If they save more than all of the startups, they tell the rate, too.
        sharing: how messages in flight shared the network in `streams`.
        algorithm, source: kept in the result; `source` is extended by what was fitted.

    Returns:
        The network; its `residual` is the median over sizes of |fitted - measured| / measured, of messages alone.

    Raises:
        InputError: fewer than two different sizes, a size or duration that is not positive, or a
            sample faster than any network.
    """
    by_size = _by_size(samples)
    count = sum(map(len, by_size.values()))
    sizes = np.array(sorted(by_size), dtype=np.float64)
    alone = np.array([np.median(by_size[size]) for size in sizes])
    medians = alone.copy()
    in_streams = _stream_medians(streams)
    for (size_bytes, messages), duration_ns in in_streams.items():
        # Messages one after another cannot take less than together. If medians say so, some
        # messages take much longer than the median one, and a plan pays for those too.
        medians[sizes == size_bytes] = np.maximum(medians[sizes == size_bytes], duration_ns / messages)
    kept = _thinned(sizes)
    shape = _shape(sizes[kept], medians[kept])
    segments, min_message_ns = shape.segments, round(shape.least)
    if min_message_ns:
        # A lone small message wakes threads that sleep, which sometimes takes several times as
        # long; a plan pays for that too, so the minimum is a mean.
        min_message_ns = max(
            min_message_ns, _mean([taken for size in sizes[kept][: shape.on_least] for taken in by_size[size]])
        )
    fit = "one line" if len(segments) == 1 else f"two lines that meet at {format_bytes(segments[0].up_to_bytes)}"
    if min_message_ns:
        fit += " and a least cost"
    span = f"{count} samples of {len(sizes)} sizes, {format_bytes(int(sizes[0]))} to {format_bytes(int(sizes[-1]))}"
    described = f"{source}; {span}; {fit}" + (f"; streams of {len(in_streams)} kinds" if in_streams else "")
    network = Network(workers, segments, algorithm, 0.0, described, sharing, min_message_ns)
    small = {kind: taken for kind, taken in in_streams.items() if network.cost_ns(kind[0]) == min_message_ns}
    large = {kind: taken for kind, taken in in_streams.items() if kind not in small}
    network = _fitting(_with_latency, network, large)
    if all(segment.latency_ns >= ALL_LATENCY * segment.startup_ns for segment in network.segments):
        network = _fitting(_with_rate, network, large)
    network = _fitting(_with_latency_of_least, network, small)
    costs = np.array([network.cost_ns(int(size)) for size in sizes], dtype=np.float64)
    return msgspec.structs.replace(network, residual=float(np.median(np.abs(costs - alone) / alone)))


def fit_bus(samples: Iterable[tuple[int, int]], devices: int, *, packet_bytes: int, source: str = "measured") -> Bus:
    """Fit a bus to reduce-scatters and all-gathers measured within hosts.

    Each takes (D - 1) startups and (D - 1) / D of its message's bytes at the rate (`Bus`). The line is
    that of `fit_network`: of least relative absolute error through the medians of all sizes.

    Args:
        samples: pairs of a message's size in bytes and the duration in ns; sizes may repeat.
        devices: D, on each host.
        packet_bytes, source: as in `Bus`; `source` is extended by what was fitted.

    Raises:
        InputError: as `fit_network`.
    """
    by_size = _by_size(samples)
    sizes = np.array(sorted(by_size), dtype=np.float64)
    medians = np.array([np.median(by_size[size]) for size in sizes])
    line = _line(sizes * (devices - 1) / devices, medians)
    error = float(np.median(np.abs(line.at(sizes * (devices - 1) / devices) - medians) / medians))
    span = f"{len(sizes)} sizes, {format_bytes(int(sizes[0]))} to {format_bytes(int(sizes[-1]))}, median error {error:.0%}"
    rate = round(min(max(NS_PER_SECOND / line.slope, 1.0), float(MAX_RATE)))
    return Bus(devices, round(line.startup / (devices - 1)), rate, packet_bytes, f"{source}; {span}")


def _stream_medians(streams: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], float]:
    """The median duration by size and number of messages."""
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
    """Of the candidates, from step 0 to `LATENCY_STEPS`, the one that fits the streams best."""

    def error(network: Network) -> float:
        return sum(abs(network.stream_ns(*kind) / duration - 1) for kind, duration in in_streams.items())

    # the error has several minima, so all candidates are tried
    return min((candidate(network, step) for step in range(LATENCY_STEPS + 1)), key=error) if in_streams else network


def _with_latency(network: Network, step: int) -> Network:
    segments = tuple(
        msgspec.structs.replace(segment, latency_ns=segment.startup_ns * step // LATENCY_STEPS) for segment in network.segments
    )
    return msgspec.structs.replace(network, segments=segments)


def _with_rate(network: Network, step: int) -> Network:
    """Of messages alone the bytes may take longer than in a row, where another's fill the gaps between
    steps of a collective. That is no startup, and a plan seldom has a message alone.
    """
    segments = tuple(
        msgspec.structs.replace(
            segment, bytes_per_second=min(MAX_RATE, segment.bytes_per_second * (LATENCY_STEPS + step) // LATENCY_STEPS)
        )
        for segment in network.segments
    )
    return msgspec.structs.replace(network, segments=segments)


def _with_latency_of_least(network: Network, step: int) -> Network:
    most_ns = (
        network.min_message_ns * (network.sharing.max_in_flight - 1) // network.sharing.max_in_flight
    )  # more latency than this makes no difference to `max_in_flight` messages
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
    """The mean without the slowest `STALLED` of the durations."""
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

    Such a line passes through a data point. For lines through a given point, the error is convex in the slope. Its minimum is
    at the weighted median of the slopes to the other points, which is clipped to the bounds. All points are tried: exact, O(n^2
    log n).
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
    # the startup may not be negative; the slope stays within its bounds, as no sample is faster
    # than MAX_RATE
    slope = np.minimum(slope, medians / sizes)
    startup = medians - slope * sizes
    errors = np.sum(np.abs(startup[:, None] + slope[:, None] * sizes[None, :] - medians[None, :]) / medians[None, :], axis=1)
    best = int(np.argmin(errors))
    return _Line(float(startup[best]), float(slope[best]), float(errors[best]))


def _shape(sizes: Floats, medians: Floats) -> _Shape:
    """One line, or a line with a minimum or two lines if they are clearly better."""
    line = _line(sizes, medians)
    best = _Shape(line.error / max(1, len(sizes) - 2), (_segment(line),))
    for other, part in (
        (_line_and_floor(sizes, medians), WORTH_A_FLOOR),
        (_two_lines(sizes, medians), WORTH_A_PIECE),
    ):
        if other is not None and _is_worth(other.error, best.error, part):
            best = other
    return best


def _is_worth(error: float, simpler: float, part: float) -> bool:
    return error <= part * simpler and simpler - error >= LEAST_GAIN


def _line_and_floor(sizes: Floats, medians: Floats) -> _Shape | None:
    """A line and a minimum, for the best number of sizes on the minimum.

    The minimum is the median of the smallest sizes' costs; the line is fitted to the other sizes.
    """
    count = len(sizes)
    best: _Shape | None = None
    for split in range(LEAST_SIZES_ON_FLOOR, count - LEAST_SIZES_ABOVE + 1):
        floor = float(np.median(medians[:split]))
        line = _line(sizes[split:], medians[split:])
        # three parameters: the line's two and the minimum, which ends where the line rises above it
        error = float(np.sum(np.abs(np.maximum(floor, line.at(sizes)) - medians) / medians)) / (count - 3)
        if best is None or error < best.error:
            best = _Shape(error, (_segment(line),), floor, split)
    return best


def _two_lines(sizes: Floats, medians: Floats) -> _Shape | None:
    count = len(sizes)
    best: _Shape | None = None
    for split in range(LEAST_SIZES_PER_PIECE, count - LEAST_SIZES_PER_PIECE + 1):
        left = _line(sizes[:split], medians[:split])
        right = _line(sizes[split:], medians[split:])
        # five parameters: two lines and the break
        error = (left.error + right.error) / max(1, count - 5)
        if best is not None and error >= best.error:
            continue
        at = _break_at(left, right, sizes[split - 1 : split + 1], medians[split - 1 : split + 1])
        if at is not None:
            best = _Shape(error, (_segment(left, at), _segment(right)))
    return best


def _break_at(left: _Line, right: _Line, sizes: Floats, medians: Floats) -> int | None:
    """Where between two neighbouring sizes the left line should end.

    Returns:
        A size in bytes, or None if the cost would fall there although the data do not.
    """
    gap = right.at(sizes) - left.at(sizes)
    if gap[0] * gap[1] < 0:
        crossing = float(sizes[0] + (sizes[1] - sizes[0]) * gap[0] / (gap[0] - gap[1]))
        return int(min(max(crossing, sizes[0]), sizes[1] - 1))
    fall = max(0.0, 1 - medians[1] / medians[0]) + TOLERATED_DROP
    if gap[0] < -fall * left.at(sizes)[0]:
        return None
    return int(sizes[0])


def _segment(line: _Line, up_to_bytes: int = MAX_BYTES) -> CostSegment:
    rate = NS_PER_SECOND / line.slope if line.slope > 0 else math.inf
    return CostSegment(min(round(line.startup), MAX_NS), round(min(max(rate, 1.0), float(MAX_RATE))), up_to_bytes)
