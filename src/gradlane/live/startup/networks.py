"""Networks: what messages cost between the ranks of a job, measured once for several sessions.

A process attaches more than once if its script trains two models or changes the optimizer. Measuring takes seconds, so later
sessions go on with the result of the first.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from gradlane.live.backends.base import Backend, Measured
from gradlane.live.backends.copies import is_equal_on_all

log = logging.getLogger("gradlane")

_VALID_S = 600.0
"""Seconds for which a network counts as known; other traffic on it comes and goes."""


class _Known(NamedTuple):
    at_s: float  # of time.monotonic()
    measured: Measured


_known: dict[tuple[object, ...], _Known] = {}
"""The last measurement of this process, by what it depends on."""


def measured_by(backend: Backend, rank: int, depends_on: tuple[object, ...]) -> Measured:
    """What another backend of these ranks has measured, if all of them know it and it is less than ten minutes old; else what
    `backend` measures now (collective).

    Args:
        backend: connected; no plan has been prepared.
        rank: of this process; 0 logs that the network is known.
        depends_on: everything that the result depends on.

    Raises what `Backend.measure` raises.
    """
    known = _known.get(depends_on)
    now_s = time.monotonic()
    if known is not None and now_s - known.at_s > _VALID_S:
        known = None
    # ranks may not agree: one has started again, or its ten minutes are over
    told = b"" if known is None else repr(known.measured).encode()
    if is_equal_on_all(told, backend.control_group, backend.control_device) and known is not None:
        backend.take_over(known.measured)
        if rank == 0:
            log.info("gradlane: the network is the one that was measured %.0f s ago", now_s - known.at_s)
        return known.measured
    measured = backend.measure()
    _known[depends_on] = _Known(time.monotonic(), measured)
    return measured
