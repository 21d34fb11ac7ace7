"""Heartbeat: sends the frames of a control channel, and beats that do not need the interpreter."""

from __future__ import annotations

import os

from gradlane._native import Heartbeat as NativeHeartbeat
from gradlane.transport.forks import spare_in_child


class Heartbeat:
    """The sending side of some connections: whole frames, and between them a beat at each interval.

    A thread in native code sends the beats, so that other processes hear of this one while a long
    call keeps the interpreter's lock. Any thread may call any method; none waits for a peer. In a
    forked child no call does anything.

    Args:
        beat: the frame of a beat but for the last 4 bytes of its payload. They are filled in with
            the milliseconds, little-endian, for which the interpreter has made no call here.
        interval_s: seconds between two beats.
    """

    def __init__(self, beat: bytes, interval_s: float) -> None:
        self._native = NativeHeartbeat(beat, round(interval_s * 1000))
        self._pid = os.getpid()
        spare_in_child(self)

    @property
    def native(self) -> NativeHeartbeat:
        """The object in native code, for the modules of this package."""
        return self._native

    def add(self, fd: int) -> None:
        """Send a beat on the connected socket `fd` now and then at each interval, until it is removed."""
        if self._is_here:
            self._native.add(fd)

    def send(self, fd: int, frame: bytes) -> None:
        """Send a whole frame. What the peer does not take yet is sent later, up to 1 MiB; with more
        than that the connection is ended. Whoever reads from `fd` notices that it is broken.
        """
        if self._is_here:
            self._native.send(fd, frame)

    def remove(self, fd: int) -> None:
        """Send nothing more on `fd`, which may be closed from now on."""
        if self._is_here:
            self._native.remove(fd)

    def lives(self) -> None:
        """Note that the interpreter runs, as every other call does too."""
        if self._is_here:
            self._native.lives()

    def close(self) -> None:
        """Send nothing more, and end the thread."""
        if self._is_here:
            self._native.close()

    @property
    def _is_here(self) -> bool:
        """Whether this process has the thread."""
        return os.getpid() == self._pid
