"""Jitter: a step takes each device another time, and the slowest device decides."""

from __future__ import annotations

import functools
import math

_REACH = 12.0  # beyond so many standard deviations nothing is drawn of a million
_STEPS = 1_200


@functools.cache
def slowest_of(devices: int) -> float:
    """How many standard deviations above the mean the slowest of some devices is, on the average.

    Each device's step is drawn from a normal distribution, independently of the others: the expected maximum of
    `devices` standard normal values, integrated numerically.

    Args:
        devices: 1 or more.
    """

    # E = integral above zero of 1 - F(x) - F(-x), F being the probability that all are below
    def integrand(x: float) -> float:
        above = math.erfc(x / math.sqrt(2)) / 2  # the probability that one device is
        return -math.expm1(devices * math.log1p(-above)) - above**devices

    # smooth and even: the trapezoidal rule has all digits with steps that are much narrower than its bend
    step = _REACH / _STEPS
    return step * (integrand(0) / 2 + math.fsum(integrand(step * index) for index in range(1, _STEPS + 1)))


def slowdown(devices: int, jitter: float) -> float:
    """By what factor a step takes longer where it waits for the slowest of some devices.

    Args:
        devices: 1 or more.
        jitter: standard deviation of a device's step, as a part of its mean.
    """
    return 1 + jitter * slowest_of(devices)
