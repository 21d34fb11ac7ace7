"""Delay and loss: a process takes up a link's packets and sends them later, or not at all.

    eth0 of a host -- near        far -- the switch's port to it
                        `- relay -'

Packet sockets on the interfaces `near` and `far` read what arrives there and send it to the other.
They pass packets on as TCP made them, before segmentation, with what the kernel needs to segment
them later. Links with loss get segmented packets, so that each is lost alone. None of this needs
root. Socket buffers and `_MOST_HELD_BYTES` bound the queue; the relay drops what does not fit, and
reports it.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import NamedTuple

from gradlane.lab.kernel import refused

_ALL_PROTOCOLS = 3
_SOL_PACKET, _STATISTICS, _VIRTIO_HEADER, _IGNORE_OUTGOING = 263, 6, 15, 23
_SO_RCVBUFFORCE = 33
_SOCKET_BYTES = 16 << 20
_LARGEST = 10 + 14 + 65_536  # virtio and Ethernet header, and the largest packet
_AT_ONCE = 64  # packets read in one direction before the next is served
_MOST_HELD_BYTES = 256 << 20
_LOOK_AFTER_NS = 1_000_000_000


class Relayed(NamedTuple):
    """A link that is relayed.

    Attributes:
        near, far: sockets at its two ends.
        delay_ns, loss_ppm: applied to packets in each direction.
    """

    near: socket.socket
    far: socket.socket
    delay_ns: int
    loss_ppm: int


def open_end(interface: str) -> socket.socket:
    """A socket for all packets that arrive at `interface` of the current network namespace."""
    try:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        end.setsockopt(_SOL_PACKET, _VIRTIO_HEADER, 1)
        end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        try:
            end.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _SOCKET_BYTES)
        except OSError:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)  # as much as the kernel allows
        end.bind((interface, _ALL_PROTOCOLS))
        end.setblocking(False)
    except OSError as error:
        raise refused(f"a packet socket on {interface}, for delay and loss", error) from error
    return end


class _Way:
    """One direction of a link: packets that have arrived and are not due yet, in order."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_ns: int, loss_ppm: int, seed: int) -> None:
        self.source, self._target = source, target
        self._delay_ns, self._loss = delay_ns, loss_ppm / 1_000_000
        self._random = random.Random(seed)
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self.overflown = 0

    def take(self) -> None:
        """Read what has arrived."""
        for _ in range(_AT_ONCE):
            try:
                packet = self.source.recv(_LARGEST)
            except BlockingIOError:
                return
            if self._loss and self._random.random() < self._loss:
                continue
            if self._held_bytes + len(packet) > _MOST_HELD_BYTES:
                self.overflown += 1
                continue
            self._held.append((time.monotonic_ns() + self._delay_ns, packet))
            self._held_bytes += len(packet)

    def give(self) -> int | None:
        """Send what is due; returns when the next packet is."""
        while self._held:
            due_ns, packet = self._held[0]
            if due_ns > time.monotonic_ns():
                return due_ns
            self._held.popleft()
            self._held_bytes -= len(packet)
            try:
                self._target.send(packet)
            except OSError:  # the link is down or full: the packet is lost, as on a real link
                self.overflown += 1
        return None


def relay(links: list[Relayed]) -> None:
    """Carry packets over `links` forever."""
    ways = []
    for host, link in enumerate(links):
        ways.append(_Way(link.near, link.far, link.delay_ns, link.loss_ppm, 2 * host))
        ways.append(_Way(link.far, link.near, link.delay_ns, link.loss_ppm, 2 * host + 1))
    by_fd = {way.source.fileno(): way for way in ways}
    look_ns = time.monotonic_ns() + _LOOK_AFTER_NS
    while True:
        due = [at for way in ways if (at := way.give()) is not None]
        now = time.monotonic_ns()
        readable, _, _ = select.select(by_fd, (), (), max(0, min(due, default=now + _LOOK_AFTER_NS) - now) / 1e9)
        for fd in readable:
            by_fd[fd].take()
        if now >= look_ns:
            look_ns = now + _LOOK_AFTER_NS
            _say_what_was_lost(ways)


def _say_what_was_lost(ways: list[_Way]) -> None:
    """Report packets that the relay dropped for lack of room."""
    lost = 0
    for way in ways:
        dropped = struct.unpack("II", way.source.getsockopt(_SOL_PACKET, _STATISTICS, 8))[1]  # since the last call
        lost += dropped + way.overflown
        way.overflown = 0
    if lost:
        print(
            f"gradlane lab: the relay for delay and loss could not keep up and lost {lost} packets in a second; "
            "use a smaller --scale",
            file=sys.stderr,
            flush=True,
        )
