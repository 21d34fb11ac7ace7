"""Beats that do not need the interpreter."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import struct
from collections.abc import Iterator

import pytest

from gradlane.transport import Heartbeat

INTERVAL_S = 0.02
LIMIT_S = 30
BEAT = struct.Struct("<4sI")  # what it begins with here, and the milliseconds


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(LIMIT_S)
        yield ours, theirs


def silences(theirs: socket.socket, count: int) -> list[int]:
    """What the next beats say: for how many milliseconds the interpreter had not run."""
    said = []
    for _ in range(count):
        head, milliseconds = BEAT.unpack(theirs.recv(BEAT.size, socket.MSG_WAITALL))
        assert head == b"beat"
        said.append(milliseconds)
    return said


def test_beats_are_sent_while_a_call_keeps_the_lock_and_say_for_how_long(ends):
    ours, theirs = ends
    heartbeat = Heartbeat(b"beat", INTERVAL_S)
    heartbeat.add(ours.fileno())
    ctypes.PyDLL(None).usleep(400_000)  # a call by way of PyDLL keeps the interpreter's lock
    heartbeat.close()
    ours.shutdown(socket.SHUT_WR)
    waiting = b"".join(iter(lambda: theirs.recv(65536), b""))
    assert max(milliseconds for _, milliseconds in BEAT.iter_unpack(waiting)) > 200


def test_a_forked_child_sends_nothing_hangs_nowhere_and_the_parent_goes_on(ends):
    ours, theirs = ends
    heartbeat = Heartbeat(b"beat", INTERVAL_S)
    heartbeat.add(ours.fileno())
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        heartbeat.send(ours.fileno(), b"of the child")
        heartbeat.close()
        del heartbeat
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    silences(theirs, 3)
    heartbeat.close()
