"""What a lab keeps of what it promises: rates, strict priority, a quick start, nothing left, the price of sampling.

    python -m bench.lab [rates|priority|starts|gauges ...]

rates      goodput both ways at once as a share of the link, headers counted (a full frame of 1514 carries 1448)
priority   a class of its own at 40 % of the link, alone and beside one that would take it all; payload
starts     a lab of 4 workers and 4 servers, 50 times, ended in each of four ways; what was left afterwards
gauges     how much of a core sampling 8 hosts 20 times a second takes, ours and through pyroute2
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gradlane import lab
from gradlane.lab import JobSpec, LabSpec
from gradlane.lab.files import write_spec
from gradlane.lab.spec import type_of_service
from gradlane.units import format_rate

TESTS = Path(__file__).parents[1] / "tests" / "lab"
PAYLOAD_SHARE = 1448 / 1514
RATES = (100, 200, 500, 1000, 2000)  # Mbit/s
RUNS, SECONDS = 3, 4


def output_of(spec: LabSpec, *command: str) -> list[str]:
    """The lines that the ranks printed, sorted by rank."""
    with tempfile.TemporaryFile("w+") as out:
        saved = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            assert lab.run(spec, [sys.executable, *command], timeout=120) == 0
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        out.seek(0)
        return [line.partition("] ")[2] or line for line in sorted(out.read().splitlines(), key=lambda line: line[:1] == "[")]


def rates() -> None:
    print(f"{'link':>12} {'share of it, each way':>40}")
    for rate in RATES:
        shares = []
        for _ in range(RUNS):
            lines = output_of(LabSpec(2, rate * 10**6), str(TESTS / "goodput.py"), str(SECONDS))
            shares += [int(line) / PAYLOAD_SHARE / (rate * 1e6) for line in lines]
        print(f"{format_rate(rate * 125_000):>12} {' '.join(f'{share:6.3f}' for share in shares):>40}", flush=True)


def priority() -> None:
    print(f"{'link':>12} {'alone Mbit/s':>13} {'beside':>8} {'lost':>7} {'the other':>10} {'as one class: lost':>19}")
    for rate in RATES:
        lost = []
        for classes in (2, 1):
            spec = LabSpec(3, rate * 10**6, network_classes=classes)
            arguments = [str(int(rate * 0.4 * 125_000)), str(type_of_service(0)), str(SECONDS)]
            outcomes = [json.loads(output_of(spec, str(TESTS / "classes.py"), *arguments)[-1]) for _ in range(RUNS)]
            alone, beside, other = (
                statistics.median(outcome[name] for outcome in outcomes) for name in ("alone", "beside", "other")
            )
            lost.append((alone, beside, 1 - beside / alone, other))
        alone, beside, share, other = lost[0]
        print(
            f"{format_rate(rate * 125_000):>12} {alone / 1e6:13.1f} {beside / 1e6:8.1f} {share:7.2%} {other / 1e6:10.1f} "
            f"{lost[1][2]:19.1%}",
            flush=True,
        )


def starts() -> None:
    """Each way of ending in turn. A FIFO that all processes hold tells when the last of them has gone."""
    ways = ("success", "failure", "Ctrl-C", "SIGKILL")
    times: dict[str, list[float]] = {way: [] for way in ways}
    setups, interfaces = [], socket.if_nameindex()
    for run in range(50):
        way = ways[run % len(ways)]
        setup, end = one_start(way)
        setups.append(setup)
        times[way].append(end)
    left = len(socket.if_nameindex()) - len(interfaces)
    print(f"50 runs: ranks and servers up after {statistics.median(setups):.2f} s (worst {max(setups):.2f})")
    for way, ends in times.items():
        print(f"  {way:8}: all gone {statistics.median(ends):.2f} s after it (worst {max(ends):.2f}), {len(ends)} runs")
    print(f"interfaces more than before: {left}; processes: none holds the FIFO")


def one_start(way: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "held")
        os.mkfifo(path)
        fd, keep = os.open(path, os.O_RDONLY | os.O_NONBLOCK), os.open(path, os.O_WRONLY)
        os.set_blocking(fd, True)
        held = f"exec 9>{path}; setsid sleep 600 & echo up >&9; "
        ends = {"success": "sleep 1; exit 0", "failure": "sleep 1; exit $RANK"}.get(way, "wait")
        job = JobSpec((0, 1, 2, 3), (4, 5, 6, 7), ("sh", "-c", held + ends), ("sh", "-c", held + "wait"))
        spec_path = Path(folder, "lab.json")
        write_spec(spec_path, LabSpec(8, 10**9, jobs=(job,)))
        began = time.monotonic()
        launcher = subprocess.Popen(
            [sys.executable, "-m", "gradlane", "lab", "--quiet", "--file", str(spec_path)],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        data = b""
        while data.count(b"up\n") < 8:
            data += os.read(fd, 100)
        setup = time.monotonic() - began
        if way == "Ctrl-C":
            os.killpg(launcher.pid, signal.SIGINT)
        elif way == "SIGKILL":
            launcher.kill()
        else:
            time.sleep(1)
        ended = time.monotonic()
        os.close(keep)
        while os.read(fd, 100):
            pass
        end = time.monotonic() - ended
        os.close(fd)
        launcher.wait(30)
        return setup, end


def gauges() -> None:
    """Inside of a lab of 8 hosts: processor time of a sample, ours, and of the same dump through pyroute2."""
    program = """
import os, time, socket
from gradlane.lab.links.gauges import _Dump
from gradlane.lab.links.shaping import open_routes
fd = os.open("/proc/self/ns/net", os.O_RDONLY)
ours, theirs, times = _Dump(fd, ["eth0"]), open_routes(), []
for look in (ours.read, theirs.get_qdiscs):
    look()
    began = time.process_time()
    for _ in range(200):
        look()
    times.append((time.process_time() - began) / 200)
if os.environ["RANK"] == "0":
    print(*times)
"""
    ours, theirs = map(float, output_of(LabSpec(1, 10**9), "-c", program)[0].split())
    # 8 hosts: each has a namespace with one link, and the switch has eight
    for name, seconds in (("own", ours), ("pyroute2", theirs)):
        print(
            f"{name:>9}: {seconds * 1e6:6.0f} us a link and look; 16 links 20 times a second take {seconds * 320:.1%} of a core"
        )


def main() -> None:
    reason = lab.supported()
    if reason is not None:
        sys.exit(reason)
    parts = {"rates": rates, "priority": priority, "starts": starts, "gauges": gauges}
    for name in sys.argv[1:] or parts:
        print(f"-- {name}")
        parts[name]()


if __name__ == "__main__":
    main()
