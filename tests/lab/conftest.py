"""What tests of a lab share: how to tell that the last process has gone."""

from __future__ import annotations

import os
import selectors
import shlex
import time
from pathlib import Path

import pytest

LIMIT_SECONDS = 20


def read_until_end(fd: int) -> bytes:
    """All that comes until every process that holds the other end is gone, which must be soon."""
    deadline, data = time.monotonic() + LIMIT_SECONDS, b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while selector.select(max(deadline - time.monotonic(), 0)):
            got = os.read(fd, 1 << 16)
            if not got:
                return data
            data += got
    raise AssertionError(f"after {LIMIT_SECONDS} s something still holds the pipe open; it gave {data!r}")


@pytest.fixture
def held(tmp_path: Path):
    """A FIFO that every rank opens, writes "up" to, and keeps open: its end is the end of the last of them."""
    path = tmp_path / "held"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    keep = os.open(path, os.O_WRONLY)  # so that the FIFO does not end before the first rank opens it
    os.set_blocking(fd, True)

    class Held:
        # with a grandchild in a session of its own, which a mere kill of the rank would leave behind
        command = ("sh", "-c", f"exec 9>{shlex.quote(str(path))}; setsid sleep 600 & echo up >&9; wait; sleep 600")

        def wait_for(self, ranks: int) -> None:
            data = b""
            with selectors.DefaultSelector() as selector:
                selector.register(fd, selectors.EVENT_READ)
                while data.count(b"up\n") < ranks:
                    assert selector.select(LIMIT_SECONDS), f"{ranks} ranks were to start, and said {data!r}"
                    data += os.read(fd, 100)

        def wait_for_end(self) -> None:
            os.close(keep)
            read_until_end(fd)

    yield Held()
    os.close(fd)
