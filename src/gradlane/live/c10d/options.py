"""Options of a process group over gradlane's transport."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from typing import Any, Literal

from gradlane.core.launch_options import STALL_TIMEOUT_S, need_stall_timeout
from gradlane.errors import InputError
from gradlane.transport.host import is_wanted

_LAST = (1 << 32) - 1  # of the priorities on the wire


def stall_timeout_s() -> float:
    """GRADLANE_STALL_TIMEOUT in the environment, in seconds; `STALL_TIMEOUT_S` without it.

    Raises:
        InputError: it is no number from 1 to 86400.
    """
    given = os.environ.get("GRADLANE_STALL_TIMEOUT")
    if given is None:
        return STALL_TIMEOUT_S
    try:
        seconds = float(given)
    except ValueError:
        raise InputError(f"GRADLANE_STALL_TIMEOUT: got {given!r}, expected seconds, from 1 to 86400") from None
    need_stall_timeout("GRADLANE_STALL_TIMEOUT", seconds)
    return seconds


@dataclass(frozen=True)
class Options:
    """The `pg_options` of `init_process_group` and `new_group`, the same on all ranks of the group.

    Args:
        order: which of several collectives in flight is sent first. "fifo" sends them in the order
            of the calls, "lifo" the latest call first: DDP sums the layers next to the input last,
            and the next step needs them first. A call within `priority(...)` goes before all
            others.
        rank_order: add the ranks' contributions in rank order. With three ranks or more this gives
            the same bits in every run, and wherever the ranks are.
        checksum: send a checksum with payloads that leave this host.
        shared_memory: where every host has equally many ranks, from 2 to 32, they sum through memory that they share, and only
            the hosts' sums use the network. With several hosts and `rank_order` they do not. Where all ranks are on one host,
            messages go through it too. Where it is not given, GRADLANE_SHARED_MEMORY=0 in the environment turns it off.
        packet_bytes: a multiple of 64 up to 512 KiB. With smaller packets an urgent call is sent
            sooner. None for 512 KiB if all ranks are on one host, else 256 KiB.
        stall_timeout: seconds, 1 to 86400, after which a rank whose process says nothing, though it is connected, is an
            error. Where it is not given: GRADLANE_STALL_TIMEOUT in the environment, or 60. A rank that computes is not
            silent, and a process that ends is noticed at once.

    Raises:
        InputError: an option, or GRADLANE_SHARED_MEMORY or GRADLANE_STALL_TIMEOUT, is out of range.
    """

    order: Literal["fifo", "lifo"] = "fifo"
    rank_order: bool = False
    checksum: bool = True
    packet_bytes: int | None = None
    shared_memory: bool = field(default_factory=is_wanted)
    stall_timeout: float = field(default_factory=stall_timeout_s)

    def __post_init__(self) -> None:
        if self.order not in ("fifo", "lifo"):
            raise InputError(f'order: got {self.order!r}, expected "fifo" or "lifo"')
        need_stall_timeout("stall_timeout", self.stall_timeout)

    @staticmethod
    def of(given: Any) -> Options:
        """The `pg_options` as torch.distributed passes them; None for the defaults. Raises
        `InputError` for another type.
        """
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
        """A digest of 32 bytes; equal options have equal ones."""
        return sha256(repr(astuple(self)).encode()).digest()
