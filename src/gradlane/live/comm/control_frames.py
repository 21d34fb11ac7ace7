"""Frames of the control channel, as bytes.

Each frame has a 16-byte little-endian header (magic, type, version, rank, length) and at most
`MAX_PAYLOAD` bytes of payload. Nothing is unpickled or evaluated.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from gradlane.errors import JobError, MismatchError, NotFiniteError, OrderError, PeerDied, PeerFailed, PeerStalled, told_of
from gradlane.live.comm.stragglers import WINDOW

MAX_PAYLOAD = 16 * 1024  # bytes
VERSION = 7
HEADER = struct.Struct("<4sBBHII")  # magic, type, version, reserved, rank, payload bytes
_MAGIC = b"GLP1"


class Frame(IntEnum):
    HELLO = 1  # token
    BEAT = 2  # milliseconds for which the sender's interpreter has not run (4 bytes)
    FAIL = 3  # kind (1 byte), culprit rank (4 bytes), text
    BYE = 4  # nothing, or as for FAIL why the sender leaves
    CHOICE = 5  # iteration (8 bytes), message (4 bytes)
    ISSUED = 6  # iteration (8 bytes), hash (8 bytes)
    DECISION = 7  # iteration (8 bytes), what rank 0 decided for it (4 bytes)
    BUFFERS = 8  # forward passes that have ended (8 bytes), what rank 0 says of its buffers (4 bytes)
    BUSY = 9  # number of a window of steps (8 bytes), microseconds of work in each of its steps (4 bytes each)
    NOT_FINITE = 10  # iteration (8 bytes), rank (4 bytes), name of its tensor
    WAITS = 11  # milliseconds for which the sender has waited (8 bytes), for what


BEAT = struct.Struct("<I")
PAIR = struct.Struct("<QI")
HASH = struct.Struct("<QQ")
TIMES = struct.Struct(f"<Q{WINDOW}I")
_WAITS = struct.Struct("<Q")
_FAIL = struct.Struct("<BI")


class Cause(IntEnum):
    """What kind of failure a FAIL frame tells."""

    DIED = 1
    STALLED = 2
    RAISED = 3
    ORDER = 4
    OTHER = 5
    MISMATCH = 6
    NOT_FINITE = 7
    LEFT = 8

    @staticmethod
    def of(error: BaseException) -> Cause:
        """The kind of a failure that a rank has found itself."""
        for kind, cause in _CAUSES:
            if isinstance(error, kind):
                return cause
        return Cause.RAISED

    def error(self, rank: int, text: str) -> JobError:
        """The error that whoever is told of this failure of `rank` raises."""
        match self:
            case Cause.DIED:
                return PeerDied(f"rank {rank} is gone: {text}", rank)
            case Cause.LEFT:
                return PeerDied(text, rank)  # the text names the rank
            case Cause.STALLED:
                return PeerStalled(f"rank {rank} is stalled: {text}", rank)
            case Cause.RAISED:
                return PeerFailed(told_of(rank, "failed", text), rank)
            case Cause.ORDER:
                return OrderError(text)  # the text names the ranks, here and in the next
            case Cause.MISMATCH:
                return MismatchError(text)
            case Cause.NOT_FINITE:
                return NotFiniteError(text, rank)
            case Cause.OTHER:
                return PeerFailed(told_of(rank, "stopped", text), rank)


_CAUSES = (
    (OrderError, Cause.ORDER),
    (MismatchError, Cause.MISMATCH),
    (NotFiniteError, Cause.NOT_FINITE),
    (PeerDied, Cause.LEFT),
    (JobError, Cause.OTHER),
)


def header(frame: Frame, rank: int, payload_bytes: int) -> bytes:
    """What comes before a payload of `payload_bytes` from `rank`."""
    return HEADER.pack(_MAGIC, frame, VERSION, 0, rank, payload_bytes)


def failure_payload(cause: Cause, rank: int, text: str) -> bytes:
    """The payload of a FAIL frame; a long text is cut."""
    return _FAIL.pack(cause, rank) + text.encode()[: MAX_PAYLOAD - _FAIL.size]


def read_failure(payload: bytes) -> tuple[Cause, int, str]:
    """What `failure_payload` has packed. Raises `struct.error` or `ValueError` for other bytes."""
    cause, rank = _FAIL.unpack_from(payload)
    return Cause(cause), rank, payload[_FAIL.size :].decode(errors="replace")


def not_finite_payload(iteration: int, rank: int, name: str) -> bytes:
    """The payload of a NOT_FINITE frame; a long name is cut."""
    return PAIR.pack(iteration, rank) + name.encode()[: MAX_PAYLOAD - PAIR.size]


def read_not_finite(payload: bytes) -> tuple[int, int, str]:
    """What `not_finite_payload` has packed. Raises `struct.error` for other bytes."""
    iteration, rank = PAIR.unpack_from(payload)
    return iteration, rank, payload[PAIR.size :].decode(errors="replace")


def waits_payload(waited_s: float, what: str) -> bytes:
    """The payload of a WAITS frame; a long text is cut."""
    return _WAITS.pack(round(waited_s * 1000)) + what.encode()[: MAX_PAYLOAD - _WAITS.size]


def read_waits(payload: bytes) -> tuple[float, str]:
    """What `waits_payload` has packed. Raises `struct.error` for other bytes."""
    (waited_ms,) = _WAITS.unpack_from(payload)
    return waited_ms / 1000, payload[_WAITS.size :].decode(errors="replace")


class Reader:
    """Takes bytes as they come, and gives whole frames."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def frames(self, data: bytes) -> list[tuple[Frame, int, bytes]]:
        """The frames that are whole now that `data` has come: type, rank, payload.

        Raises:
            ValueError: the bytes are no frame.
        """
        self._unread += data
        found = []
        while len(self._unread) >= HEADER.size:
            magic, kind, version, _, rank, length = HEADER.unpack_from(self._unread)
            if magic != _MAGIC or version != VERSION or length > MAX_PAYLOAD:
                raise ValueError("not a frame of gradlane's control channel")
            if len(self._unread) < HEADER.size + length:
                break
            found.append((Frame(kind), rank, bytes(self._unread[HEADER.size : HEADER.size + length])))
            del self._unread[: HEADER.size + length]
        return found
