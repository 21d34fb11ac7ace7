"""Proxy: a TCP relay on loopback that damages what passes: swallows it, cuts it off, resets, flips a bit, slows down."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Proxy:
    """Relays each connection made to `address` to the target. `up` is towards the target, `down` from it.

    Every byte of a direction has its place in the stream, from 0. Faults act on all connections, those made later too.
    With `holds_bytes` the kernel takes no more than about that from a peer ahead of what is passed on, and not some MB.
    """

    def __init__(self, target: tuple[str, int], holds_bytes: int | None = None) -> None:
        self._target = target
        self._holds_bytes = holds_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._hold(self._listener)  # whom it accepts inherits it
        self.address: tuple[str, int] = self._listener.getsockname()
        self._sockets: list[socket.socket] = []
        self._swallows = threading.Event()
        self.flips: dict[str, int] = {}
        """By direction: the bit (8 to a byte) of the stream to turn over."""
        self.ends: dict[str, int] = {}
        """By direction: after how many bytes to end the connection, both ways, with a FIN."""
        self.bytes_per_second: float | None = None
        self.recorded: dict[str, bytearray] = {"up": bytearray(), "down": bytearray()}
        """What came to be passed on, by direction."""
        self._passed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def wait_for_bytes(self, way: str, count: int) -> None:
        """Return when so many have passed in a direction, from now on."""
        until = len(self.recorded[way]) + count
        with self._passed:
            assert self._passed.wait_for(lambda: len(self.recorded[way]) >= until, 30), f"nothing passes {way}"

    def swallow(self) -> None:
        """From now on every byte is read and dropped, and nobody is told: both ends believe in the other."""
        self._swallows.set()

    def reset(self) -> None:
        """End every connection with RST."""
        for each in self._sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()

    def close(self) -> None:
        for each in [self._listener, *self._sockets]:
            _end(each)
        for thread in self._threads:
            thread.join(5)
        for each in [self._listener, *self._sockets]:
            each.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
                far = socket.socket()
                self._sockets += [near, far]
                self._hold(far)
                far.connect(self._target)
            except OSError:
                return
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._relay, near, far, "up")
            self._start(self._relay, far, near, "down")

    def _hold(self, each: socket.socket) -> None:
        if self._holds_bytes is not None:  # before it connects, as the window is agreed upon then
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._holds_bytes)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._holds_bytes)

    def _relay(self, source: socket.socket, target: socket.socket, way: str) -> None:
        at = 0
        while True:
            try:
                data = bytearray(source.recv(1 << 16))
                if not data:
                    if not self._swallows.is_set():
                        target.shutdown(socket.SHUT_WR)
                    return
                if self._swallows.is_set():
                    continue
                bit = self.flips.get(way)
                if bit is not None and at <= bit // 8 < at + len(data):
                    data[bit // 8 - at] ^= 1 << bit % 8
                end = self.ends.get(way)
                if end is not None and at + len(data) >= end:
                    target.sendall(data[: end - at])
                    _end(target)
                    _end(source)
                    return
                with self._passed:
                    self.recorded[way] += data  # before it is sent: whoever has an answer to it may look
                    self._passed.notify_all()
                target.sendall(data)
                at += len(data)
                if self.bytes_per_second is not None:
                    time.sleep(len(data) / self.bytes_per_second)
            except OSError:
                return


def _end(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


@contextmanager
def proxy(target: tuple[str, int]) -> Iterator[Proxy]:
    relay = Proxy(target)
    try:
        yield relay
    finally:
        relay.close()
