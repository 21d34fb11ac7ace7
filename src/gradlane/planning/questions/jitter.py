"""Jitter: a step takes each device another time, and the slowest device decides."""

from __future__ import annotations

import functools

import numpy as np

_REACH = 12.0  # beyond so many standard deviations nothing is drawn of a million
_POINTS = 200_001


@functools.cache
def slowest_of(devices: int) -> float:
    """How many standard deviations above the mean the slowest of some devices is, on the average.

    Each device's step is drawn from a normal distribution, independently of the others: the expected maximum of
    `devices` standard normal values, integrated numerically.

    Args:
        devices: 1 or more.
    """
    from scipy.special import log_ndtr  # takes longer to import than most plans to make

    # E = integral above zero of 1 - F(x) - F(-x), F being the probability that all are below
    x = np.linspace(0, _REACH, _POINTS)
    y = 1 - np.exp(devices * log_ndtr(x)) - np.exp(devices * log_ndtr(-x))
    return float(((y[1:] + y[:-1]) / 2).sum() * (x[1] - x[0]))


def slowdown(devices: int, jitter: float) -> float:
    """By what factor a step takes longer where it waits for the slowest of some devices.

    Args:
        devices: 1 or more.
        jitter: standard deviation of a device's step, as a part of its mean.
    """
    return 1 + jitter * slowest_of(devices)
