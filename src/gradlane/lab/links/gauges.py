"""Samples of every shaped link, 20 times a second, as lines of JSON: bytes passed and bytes queued.

This module asks for a dump of queueing disciplines and parses it itself. pyroute2 takes 0.8 ms for each link, a quarter of a
core for eight hosts. This takes a hundredth of that (`python -m bench.lab gauges`).
"""

from __future__ import annotations

import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gradlane.errors import FormatError
from gradlane.lab import kernel
from gradlane.lab.links.wires import Wires, port_name
from gradlane.lab.processes import INTERFACE
from gradlane.lab.spec import LabSpec

PERIOD_NS = 50_000_000

_RTM_NEWQDISC, _RTM_GETQDISC, _NLMSG_DONE, _NLMSG_ERROR = 36, 38, 3, 2
_REQUEST_DUMP = 0x301
_ROOT = 0xFFFF_FFFF
_TCA_STATS = 3
_HEADER = struct.Struct("=IHHII")
_TCMSG = struct.Struct("=BBHiIII")
_ATTRIBUTE = struct.Struct("=HH")
_STATS = struct.Struct("=QIIIIIII")  # bytes, packets, drops, overlimits, bps, pps, qlen, backlog


class Gauge(msgspec.Struct, frozen=True, array_like=True):
    """One direction of a link; headers count.

    Attributes:
        passed_bytes: all bytes that have passed so far.
        queued_bytes: bytes that wait.
    """

    passed_bytes: int
    queued_bytes: int


class Sample(msgspec.Struct, frozen=True):
    """All links at one time.

    Attributes:
        at_ns: on the monotonic clock, as timelines.
        up, down: by host; None for a link that is not shaped.
    """

    at_ns: int
    up: tuple[Gauge | None, ...]
    down: tuple[Gauge | None, ...]


def read_samples(path: str | Path) -> list[Sample]:
    """Read what a lab wrote to `samples`, without a last line that is incomplete.

    Raises:
        FormatError: the file does not hold samples.
    """
    data = Path(path).read_bytes()
    try:
        return msgspec.json.Decoder(Sample).decode_lines(data[: data.rfind(b"\n") + 1])
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path}: not samples of a lab: {error}") from None


def record(spec: LabSpec, wires: Wires, path: str) -> None:
    """Write a sample every `PERIOD_NS` until killed."""
    switch = _Dump(wires.switch_fd, [port_name(host) for host in range(spec.hosts)])
    hosts = [_Dump(fd, [INTERFACE]) for fd in wires.namespace_fds]
    encoder = msgspec.json.Encoder()
    with open(path, "wb", buffering=0) as file:
        due_ns = time.monotonic_ns()
        while True:
            sample = Sample(time.monotonic_ns(), tuple(host.read()[0] for host in hosts), tuple(switch.read()))
            try:
                file.write(encoder.encode(sample) + b"\n")
            except OSError as error:
                print(f"gradlane: {path}: no more samples are written, and the lab goes on: {error.strerror}", file=sys.stderr)
                signal.pause()  # the end of this process would be the lab's
            due_ns += PERIOD_NS
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)


class _Dump:
    """Reads the gauges of some interfaces of one namespace."""

    def __init__(self, namespace_fd: int, interfaces: list[str]) -> None:
        kernel.setns(namespace_fd, kernel.CLONE_NEWNET)
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._places = {socket.if_nametoindex(name): place for place, name in enumerate(interfaces)}
        size = _HEADER.size + _TCMSG.size
        self._request = _HEADER.pack(size, _RTM_GETQDISC, _REQUEST_DUMP, 0, 0) + _TCMSG.pack(0, 0, 0, 0, 0, 0, 0)

    def read(self) -> list[Gauge | None]:
        self._socket.send(self._request)
        gauges: list[Gauge | None] = [None] * len(self._places)
        while True:
            data = self._socket.recv(1 << 16)
            for kind, start, end in _messages(data):
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return gauges
                _, _, _, index, _, parent, _ = _TCMSG.unpack_from(data, start)
                place = self._places.get(index)
                if kind == _RTM_NEWQDISC and parent == _ROOT and place is not None:
                    gauges[place] = _gauge(data, start + _TCMSG.size, end)


def _messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Kind, start and end of the body of each netlink message."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, at)
        yield kind, at + _HEADER.size, at + length
        at += (max(length, _HEADER.size) + 3) & ~3


def _gauge(data: bytes, at: int, end: int) -> Gauge | None:
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if kind == _TCA_STATS:
            stats = _STATS.unpack_from(data, at + _ATTRIBUTE.size)
            return Gauge(stats[0], stats[7])
        at += (max(length, _ATTRIBUTE.size) + 3) & ~3
    return None
