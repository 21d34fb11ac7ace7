"""Options of a process group over gradlane's transport; the same on all its ranks."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from hashlib import sha256
from typing import Any, Literal

from gradlane.errors import InputError

_LAST = (1 << 32) - 1  # of the priorities on the wire


@dataclass(frozen=True)
class Options:
    """What `init_process_group(..., pg_options=)` and `new_group(..., pg_options=)` take.

    order: which of several collectives under way has the wire. "fifo": in the order of the calls. "lifo": the latest
    call first; DDP hands the layers next to the input over last, and the next step needs them first. A
    `priority(...)` around a call goes before either. rank_order: add contributions in rank order, for the same bits in
    every run with three ranks or more. checksum: of payloads that leave this host.
    packet_bytes: a multiple of 64 up to 512 KiB; the smaller, the sooner an urgent call gets the wire. None: the
    largest where all ranks are on this host and 128 KiB elsewhere.
    """

    order: Literal["fifo", "lifo"] = "fifo"
    rank_order: bool = False
    checksum: bool = True
    packet_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ("fifo", "lifo"):
            raise InputError(f'order: got {self.order!r}, expected "fifo" or "lifo"')

    @staticmethod
    def of(given: Any) -> Options:
        """`given` as it came through torch.distributed; None: the defaults. Raises `InputError` for another's."""
        if given is None:
            return Options()
        if not isinstance(given, Options):
            raise InputError(f"pg_options: got {type(given).__name__}, expected gradlane.live.c10d.Options")
        return given

    def priority_of(self, level: int | None, number: int) -> int:
        """The priority of a call's tensors on the connections, which follow `gradlane.schedule.wire_order`.

        Every tensor of a group is "urgent first", so that calls with a level compare with those without.

        Args:
            level: what `priority(level)` around the call says, 0 to 65535; None without it.
            number: the id of the call's first tensor, which rises from call to call, below 2^32 - 2^16 - 1.

        Returns:
            `level`, or a number above all levels: the same for all calls ("fifo"), or a smaller one for each later call
            ("lifo").
        """
        if level is not None:
            return level
        return _LAST if self.order == "fifo" else _LAST - 1 - number

    def fingerprint(self) -> bytes:
        """32 bytes that are equal where the options are."""
        return sha256(repr(astuple(self)).encode()).digest()
