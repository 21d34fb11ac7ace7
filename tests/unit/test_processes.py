"""What a test starts ends with it."""

from __future__ import annotations

import os
import subprocess

from tests import processes
from tests.lab.conftest import read_until_end


def test_what_still_runs_behind_the_block_is_ended_with_its_children() -> None:
    # a child in a session of its own holds the pipe as well: it ends when both have
    command = ["sh", "-c", "setsid sleep 600 & echo up; wait"]
    with processes.ended():
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        rest = os.dup(process.stdout.fileno())
    assert process.returncode == -9
    assert read_until_end(rest) == b""
    os.close(rest)


def test_what_was_started_before_the_block_goes_on() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with processes.ended():
        subprocess.run(["true"], check=True)
    assert process.communicate(b"here", timeout=20)[0] == b"here"
