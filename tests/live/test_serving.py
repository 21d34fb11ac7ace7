"""Servers in processes of their own: what `gradlane server` serves, how it ends, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlane.core.plan import WIRES
from gradlane.errors import CommunicationError
from gradlane.live.backends.external_servers import serve
from gradlane.planning import catalog
from tests.commands import EXAMPLE, ROOT, command_line, gradlane
from tests.live.cases import differences
from tests.live.ranks import Ranks
from tests.live.resuming import undisturbed
from tests.live.test_equality import GIVEN, KNOBS
from tests.ports import free_port

APART = [(name, KNOBS.get(name, {})) for name in catalog.names("server", external=True)]


class Served:
    """Ranks with servers of their own, which have come to the job: whoever comes later misses its first calls."""

    def __init__(self, world: int, servers: int, *options: str) -> None:
        """options: of `gradlane server`."""
        self.ranks = Ranks(world)
        command = command_line("server", self.ranks.store, *options)
        # unbuffered, so that what is read until a server has come is no more than that
        how: dict[str, Any] = {"stderr": subprocess.PIPE, "bufsize": 0, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
        self.servers = [subprocess.Popen(command, **how) for _ in range(servers)]
        self.said: list[str] = []  # what each has said since it came, once they are closed
        try:
            for server in self.servers:
                assert any(b" has come to the job " in line for line in server.stderr), "a server ended before it came"
        except BaseException:
            self.close()
            raise

    def close(self) -> list[int]:
        """The servers' exit codes, once the job is over."""
        self.ranks.close()
        try:
            self.said = [server.communicate(timeout=20)[1].decode() for server in self.servers]
        finally:
            for server in self.servers:
                server.kill()
                server.wait()
        return [server.returncode for server in self.servers]


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(2, 2)
    yield served
    served.close()


def test_servers_of_their_own_keep_the_promises_of_backends(served: Served) -> None:
    options = {"name": "server", "options": {"rank_order": True, "external": 2}, "two_phase": False}
    assert served.ranks.run("tests.contract.test_backends:check", wires=WIRES, **options) == [[]] * 2
    assert served.close() == [0, 0]


def test_every_policy_over_servers_of_their_own_equals_ddp_bit_for_bit(served: Served) -> None:
    options = {"model": "tied-transformer", "optimizer": "adam", "policies": APART, "network": GIVEN}
    for found in served.ranks.run("tests.live.cases:equals_ddp", backend="server", servers=2, **options):
        assert found == {str(policy): [] for policy in APART}
    assert served.close() == [0, 0]
    for text in served.said:
        assert text.count("all workers have left") >= len(APART)
        assert text.splitlines()[-1].endswith("the job is over")


def test_a_server_that_the_job_did_not_need_says_so() -> None:
    served = Served(2, 1)
    assert served.close() == [0]
    assert "the job is over and has not needed this server; ranks use N of them by" in served.said[0]


def test_in_rank_order_servers_of_their_own_give_the_bits_of_servers_in_the_ranks() -> None:
    served = Served(3, 2)
    try:
        case = "tests.live.servers:train_under_each"
        inside = served.ranks.run(case, summation_order="rank", only="wfbp")[0]["wfbp"]
        for outcome in served.ranks.run(case, summation_order="rank", servers=2):
            for policy, bits in outcome.items():
                assert differences(inside, bits) == [], policy
    finally:
        served.close()


def test_a_killed_server_is_named_by_all_ranks(served: Served) -> None:
    outcomes = served.ranks.try_run("tests.live.servers:train_until_it_fails", servers=2, kill=served.servers[0].pid)
    assert sorted(served.close()) == [-signal.SIGKILL, 1]
    (number,) = {line.split()[2] for line in served.said[0].splitlines() if " of 2 serves 2 workers " in line}
    for fine, (error, text, rank) in outcomes:
        assert fine
        assert (error, rank) == ("PeerDied", None)
        # a rank whose link to the other server ends first hears the verdict of whoever found the death
        assert re.match(rf"transport: ((server|rank) \d says: )*server {number} at 127\.0\.0\.1:", text), text


def test_a_server_that_is_killed_while_a_call_forms_is_named_and_the_next_call_has_all(served: Served) -> None:
    for error, text, is_served in served.ranks.run("tests.live.servers:lose_a_server_while_a_call_forms", servers=2):
        assert error in ("CommunicationError", "PeerFailed")  # found here, or told by the other rank
        assert "server 0 did not come to meet the others within 3 s; is it started, with gradlane server" in text
        assert is_served
    assert sorted(served.close()) == [0, 1]  # one says that a call failed


def test_a_model_that_a_server_has_no_memory_for_is_refused_before_the_first_step() -> None:
    served = Served(2, 1, "--memory", "20KiB")
    try:
        outcomes = served.ranks.run("tests.live.servers:train_until_it_fails", servers=1)
        assert all("20480 are allowed" in text for _, text, _ in outcomes)
        # by the server, or by the other rank, whichever came first
        assert "CapacityError" in {error for error, _, _ in outcomes} <= {"CapacityError", "PeerFailed"}
    finally:
        assert served.close() == [1]


def test_launch_starts_servers_beside_the_ranks_and_ends_them_with_the_job() -> None:
    done = gradlane(
        "launch", "--nproc", 2, "--standalone", "--backend", "server", "--servers", 2, "--policy", "mercury", EXAMPLE
    )
    assert done.stdout.splitlines() == EXAMPLE.with_suffix(".out").read_text().splitlines()
    for server in (0, 1):
        assert f"server {server} of 2 serves 2 workers" in done.stderr
        assert f"server {server}: all workers have left" in done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--servers", 1], "--servers: got it without --backend server, expected both"),
        (["--backend", "server", "--servers", 0], "--servers: got '0', expected an integer from 1"),
        (["--backend", "server", "--servers", 1, "--await-servers", 1], "servers of here, or of other hosts"),
    ],
)
def test_launch_refuses_servers_that_cannot_be(options: list[object], text: str) -> None:
    assert text in gradlane("launch", *options, EXAMPLE, expect=2).stderr


def test_a_server_without_a_job_says_at_once_what_it_waits_for_and_gives_up() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    said: list[str] = []
    with pytest.raises(
        CommunicationError, match=f"^no store of a job at {nobody} within 0.3 s .*refused.*; expected the --rdzv-"
    ):
        serve(nobody, said.append, said.append, wait_s=0.3)
    assert said == [f"waiting up to 0.3 s for a job's store at {nobody}"]


def test_a_server_gives_up_what_accepts_connections_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        at = f"127.0.0.1:{mute.getsockname()[1]}"
        done = gradlane("server", at, "--wait", 0.3, expect=1)
    assert f"what listens at {at} gave no answer within 2.3 s; expected the store of a job" in done.stderr


@pytest.mark.parametrize("place", ["node0", "node0:", "node0:0", "node0:http", ":29400"])
def test_server_refuses_what_is_no_place(place: str) -> None:
    assert "expected HOST:PORT" in gradlane("server", place, expect=2).stderr


def resumed(folder: Path, *options: object) -> subprocess.Popen[bytes]:
    """A job that loses a server in its first attempt."""
    script = Path(__file__).parent / "scripts" / "resumed.py"
    launch = ["launch", "--nproc", 2, "--max-restarts", 1, "--backend", "server", *options[:-2], script, folder, *options[-2:]]
    return subprocess.Popen(command_line(*launch), env={**os.environ, "PYTHONPATH": str(ROOT)})


def assert_is_undisturbed(folder: Path) -> None:
    assert (folder / "attempts").read_text() == "1"
    trained = torch.load(folder / "state")["model"]
    assert all(torch.equal(trained[name], value) for name, value in undisturbed().items())


@pytest.mark.extra
def test_a_killed_server_that_is_started_again_serves_the_next_attempt_with_the_state_of_the_checkpoint(tmp_path: Path) -> None:
    store = f"127.0.0.1:{free_port()}"
    servers = [subprocess.Popen(command_line("server", store)) for _ in range(2)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", store]
    job = resumed(tmp_path, *rendezvous, "--await-servers", 2, "servers", servers[0].pid)
    try:
        assert servers[0].wait(60) == -signal.SIGKILL
        servers.append(subprocess.Popen(command_line("server", store)))
        assert job.wait(60) == 0
        assert [process.wait(20) for process in servers[1:]] == [1, 0]  # it says that an attempt failed
    finally:
        for process in (*servers, job):
            process.kill()
            process.wait()
    assert_is_undisturbed(tmp_path)


@pytest.mark.extra
def test_launch_starts_a_killed_server_again_for_the_next_attempt(tmp_path: Path) -> None:
    job = resumed(tmp_path, "--standalone", "--servers", 2, "ranks", 0)
    try:
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    assert_is_undisturbed(tmp_path)
