"""One worker that pushes to one server and pulls its sums, beside `iperf3 --bidir` on the same link, in turns.

    python -m bench.goodput              loopback, then emulated hosts at 1 Gbit/s
    python -m bench.goodput --link 200mbit

Rank 0 is a worker; rank 1 is another with the only server in its process, so that every byte of rank 0 crosses the link,
is added to another, and comes back. Several tensors are under way at once. Goodput: gradient bytes each way over the
time in which they moved. CPU: of both processes, per gigabyte of gradients that moved each way. Needs iperf3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from gradlane.transport import Node, NodeOptions

TURNS, SECONDS = 3, 2
TENSORS, TENSOR_BYTES = 8, 4 << 20
PACKETS = (30 << 10, 128 << 10, 512 << 10)
PORT = 29600
SECRET = b"of one benchmark"
_SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


Turn = tuple[float, float, float]
"""Gigabytes a second up and down, CPU seconds per gigabyte each way."""


def iperf(rank: int, address: str, port: int) -> Turn | None:
    """A turn of rank 0; None if iperf3 ends with an error."""
    if rank == 1:
        with socket.create_server((address, port + 1000)) as over:
            server = subprocess.Popen(["iperf3", "-s", "-B", address, "-p", str(port)], **_SILENT)
            over.accept()[0].close()
            server.kill()
            server.wait()
        return 0, 0, 0
    command = ["iperf3", "-c", address, "-p", str(port), "--bidir", "-t", str(SECONDS), "-O", "1", "-J"]
    for _ in range(10):
        _await_listener(address, port)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if fault_of(done) is None:
            break
        time.sleep(0.2)  # the server is still busy with the question whether it listens
    socket.create_connection((address, port + 1000)).close()
    error = fault_of(done)
    if error is not None:
        print(f"bench.goodput: iperf3 measured nothing: {error}", file=sys.stderr, flush=True)
        return None
    end: dict[str, Any] = json.loads(done.stdout)["end"]
    up = end["sum_received"]["bits_per_second"] / 8e9
    down = end["sum_received_bidir_reverse"]["bits_per_second"] / 8e9
    percent = end["cpu_utilization_percent"]
    return up, down, (percent["host_total"] + percent["remote_total"]) / 100 / ((up + down) / 2)


def fault_of(done: subprocess.CompletedProcess[str]) -> str | None:
    """What iperf3 says went wrong, in one line; None if it has measured. Its error may come as JSON and with exit code 0."""
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = {}
    if "error" in report:
        return str(report["error"])
    if done.returncode or "end" not in report:
        return " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    return None


def ours(rank: int, address: str, port: int, packet_bytes: int, checksum: bool) -> Turn:
    """The same of a node; up and down are alike, since what goes up comes down."""
    options = NodeOptions(
        world=2, servers=1, rank=rank, server=0 if rank == 1 else None, address=address, port=port if rank == 1 else 0,
        secret=SECRET, packet_bytes=packet_bytes, checksum=checksum,
    )  # fmt: skip
    with Node(options) as node:
        if rank == 0:
            _await_listener(address, port)
            node.dial(0, address, port)
        node.join(20)
        data = [np.zeros(TENSOR_BYTES // 4, np.float32) for _ in range(TENSORS)]
        for tensor, each in enumerate(data):
            node.define(tensor, each.ctypes.data, each.nbytes, "float32")
        for tensor in range(TENSORS):
            node.push(tensor)
        # both ranks go around as often: a tensor goes on until rank 0 has said, in the sum before, that it is the last
        goes_on, moved, over = True, 0, 0
        began, cpu = time.perf_counter(), time.process_time()
        while over < TENSORS:
            for tensor in node.take(20):
                moved += 1
                each = data[tensor]
                if each[0] != 0:
                    over += 1
                    continue
                goes_on = goes_on and (rank == 1 or time.perf_counter() - began < SECONDS)
                each[:] = 0
                each[0] = 0 if goes_on or rank == 1 else 1
                node.push(tensor)
        gigabytes = moved * TENSOR_BYTES / 1e9
        return gigabytes / (time.perf_counter() - began), 0, (time.process_time() - cpu) / gigabytes


def _await_listener(address: str, port: int) -> None:
    for _ in range(400):
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            return
        time.sleep(0.02)


def run(rank: int, address: str, link: str) -> None:
    arms: dict[str, Any] = {"iperf3 --bidir": iperf}
    for packet_bytes in PACKETS:
        for checksum in (False, True):
            name = f"{packet_bytes >> 10} KiB packets{', checksums' if checksum else ''}"
            arms[name] = partial(ours, packet_bytes=packet_bytes, checksum=checksum)
    got: dict[str, list[Turn | None]] = {arm: [] for arm in arms}
    port = PORT
    for turn in range(TURNS):
        for name in arms if turn % 2 == 0 else reversed(arms):
            port += 1
            got[name].append(arms[name](rank, address, port))
    said = {name: [turn and turn[-1] for turn in turns] for name, turns in got.items()}
    if rank == 1:
        print("CPU " + json.dumps(said), flush=True)
        return
    print("GOT " + json.dumps({"link": link, "arms": got}), flush=True)


def show(lines: list[str]) -> None:
    other = next(json.loads(line.partition("CPU ")[2]) for line in lines if "CPU " in line)
    result = next(json.loads(line.partition("GOT ")[2]) for line in lines if "GOT " in line)
    arms = result["arms"]
    beside = [min(turn[:2]) for turn in arms["iperf3 --bidir"] if turn is not None]
    base = statistics.median(beside) if beside else None
    print(f"\ngoodput on {result['link']}, each way, {TURNS} turns of {SECONDS} s")
    print(f"{'':>26} {'Gbit/s (least..most)':>24} {'of iperf3':>10} {'CPU s/GB':>9}")
    for name, turns in arms.items():
        is_iperf = name == "iperf3 --bidir"
        measured = [(turn, theirs) for turn, theirs in zip(turns, other[name], strict=True) if turn is not None]
        if not measured:
            print(f"{name:>26} {'-':>24} {'-':>10} {'-':>9}", flush=True)
            continue
        rates = [min(up, down) if is_iperf else up for (up, down, _), _ in measured]
        cpus = [mine + (0 if is_iperf else theirs) for (*_, mine), theirs in measured]
        middle = statistics.median(rates)
        spread = f"{middle * 8:.3f} ({min(rates) * 8:.3f}..{max(rates) * 8:.3f})"
        of_iperf = "-" if base is None else f"{middle / base:.0%}"
        print(f"{name:>26} {spread:>24} {of_iperf:>10} {statistics.median(cpus):9.2f}", flush=True)


def loopback() -> list[str]:
    command = [sys.executable, "-m", "bench.goodput", "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    return [line for rank in ranks for line in rank.communicate()[0].splitlines()]


def in_lab(link: str) -> list[str]:
    command = [sys.executable, "-m", "gradlane", "lab", "--quiet", "--hosts", "2", "--link", link, "--"]
    arguments = [sys.executable, "-m", "bench.goodput", "--rank", "-1", "--link", link]
    return subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--rank", type=int)
    given = parser.parse_args()
    if given.rank is not None:
        in_a_lab = given.rank < 0
        rank = int(os.environ["RANK"]) if in_a_lab else given.rank
        run(rank, "10.77.0.2" if in_a_lab else "127.0.0.1", given.link if in_a_lab else "loopback")
        return
    if shutil.which("iperf3") is None:
        sys.exit("bench.goodput: iperf3 is not installed; it is what goodput is compared with")
    show(loopback())
    show(in_lab(given.link))


if __name__ == "__main__":
    main()
