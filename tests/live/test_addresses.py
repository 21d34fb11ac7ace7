"""Ranks on several hosts find one another whatever a host calls itself, and over the interface that somebody names."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gradlane.errors import InputError
from gradlane.lab import supported
from gradlane.live.backends.addresses import own_address, route, store_address
from gradlane.transport.formation import is_loopback
from tests.live.script_server import SCRIPTS

pytestmark = pytest.mark.matrix

needs_lab = pytest.mark.skipif(supported() is not None, reason=f"no lab here: {supported()}")


def on_two_hosts(case: str, backend: str) -> dict[int, tuple[list[str], str]]:
    """Where each rank's control channel listens, and what it has summed."""
    lab = [sys.executable, "-m", "gradlane", "lab", "--quiet", "--hosts", "2", "--link", "1gbit", "--"]
    script = [sys.executable, str(SCRIPTS / "addresses.py"), case, backend]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*lab, *script], env=environment, text=True, capture_output=True, check=False, timeout=240)
    said = re.findall(r"(\d) listens (\S*) has (\S+)", done.stdout)
    assert len(said) == 2, done.stderr
    return {int(rank): (listens.split(",") if listens else [], summed) for rank, listens, summed in said}


@needs_lab
@pytest.mark.parametrize(
    ("case", "backend", "listens"),
    [
        ("own name", "all-reduce", ["10.77.0.1", "127.0.0.1"]),
        ("own name", "server", ["10.77.0.1", "127.0.0.1"]),
        ("bridge", "server", ["10.77.0.1", "127.0.0.1"]),
        ("named", "server", ["10.77.0.1"]),
        ("six", "server", ["fd77::1"]),
    ],
)
def test_a_host_whose_own_name_is_loopback_is_reached_by_the_others(case: str, backend: str, listens: list[str]) -> None:
    ends = on_two_hosts(case, backend)
    assert [own for own in ends[0][0] if not is_loopback(own)] == [own for own in listens if not is_loopback(own)]
    assert ends[1] == ([], ends[0][1])
    assert ends[0][1] == "6.0"  # 4 (1 + 2) / 2


def test_an_interface_that_a_variable_names_wins_over_the_route() -> None:
    towards = {"MASTER_ADDR": "127.0.0.1"}
    for named in ("GRADLANE_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert own_address({**towards, named: "lo"}) == "127.0.0.1"
        with pytest.raises(
            InputError, match=rf"{named}: got 'nosuch0', expected an interface of this host that has an address: lo"
        ):
            own_address({**towards, named: "nosuch0"})
    assert own_address({**towards, "NCCL_SOCKET_IFNAME": "=lo"}) == "127.0.0.1"
    assert own_address({**towards, "NCCL_SOCKET_IFNAME": "^docker"}) == "127.0.0.1"
    assert own_address({**towards, "GRADLANE_INTERFACE": "lo", "GLOO_SOCKET_IFNAME": "nosuch0"}) == "127.0.0.1"
    names = [name for _, name in socket.if_nameindex()]
    assert own_address({**towards, "NCCL_SOCKET_IFNAME": f"nosuch0,{names[0][:1]}"})


def test_the_address_towards_a_host_and_the_one_that_it_has() -> None:
    assert route("127.0.1.1", 1) == ("127.0.0.1", "127.0.1.1")
    assert store_address({"MASTER_ADDR": "127.0.1.1"}) == "127.0.1.1"
    assert [is_loopback(each) for each in ("127.0.1.1", "::1", "10.0.0.1", "fe80::1%lo", "a-name")] == [
        True,
        True,
        False,
        False,
        False,
    ]
