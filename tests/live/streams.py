"""The CPU as a device with streams, for sessions, with every use of memory checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.staging import Staging
from gradlane.live.comm.driver import Driver
from gradlane.live.torch_modes import outside_of_modes
from gradlane.testing.streams import CheckedStreams


@contextlib.contextmanager
def streams_on_the_host(late: bool, orders: bool = False) -> Iterator[CheckedStreams]:
    """Sessions attached inside take the CPU for a device with streams, in which collectives take their turn if `orders`.

    What is summed in CPU memory is used by threads that no dispatch mode watches, from when the engine hears of it until the
    sum is copied up.
    """
    streams = CheckedStreams(late, orders)
    ready, queue_up, prepare = Driver._ready, Staging._queue_up, AllReduceBackend.prepare

    def handed_over(driver: Driver, tensors: Sequence[int]) -> None:
        if driver._staging is not None:
            streams.host_accesses(driver.summed.range_of(tensors[0], tensors[-1]), writes=True)
        ready(driver, tensors)

    def summed(staging: Staging, tensors: Sequence[int]) -> None:
        with outside_of_modes():
            for tensor in tensors:
                streams.host_accesses(staging.mirror.range_of(tensor, tensor), writes=True)
        queue_up(staging, tensors)

    def watched(backend: AllReduceBackend, *args: Any) -> Any:
        with streams.on(streams.scripts()):  # a thread that ends with the call
            return prepare(backend, *args)

    patches: list[Any] = [
        patch("gradlane.live.startup.attach.streams_of", lambda device: streams),
        patch.object(Driver, "_ready", handed_over),
        patch.object(Staging, "_queue_up", summed),
        patch.object(AllReduceBackend, "prepare", watched),
    ]
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        with streams.watching():
            yield streams
