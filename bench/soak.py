"""Ten thousand iterations among two workers: memory and descriptors; and goodput while strangers knock.

python -m bench.soak [ITERATIONS]
"""

from __future__ import annotations

import socket
import sys
import threading
import time

from tests.transport.jobs import each_with_a_server, job

STRANGERS_PER_SECOND = 100
ROUNDS = 5
SECONDS = 2.0
WARM = 20


def soak(iterations: int) -> None:
    with job(each_with_a_server(2), sizes=(40_000, 4, 10_000)) as running:
        running.all("iterate", 500)
        before = [(member.call("resident_bytes"), member.call("descriptors")) for member in running.members]
        began = time.monotonic()
        for member in running.members:
            member.begin("iterate", iterations)
        for member in running.members:
            outcome = member.outcome(600)
            assert not outcome.error, outcome.text
        took_s = time.monotonic() - began
        for rank, member in enumerate(running.members):
            resident, descriptors = member.call("resident_bytes"), member.call("descriptors")
            slope = (resident - before[rank][0]) / iterations
            print(
                f"rank {rank}: {iterations} iterations in {took_s:.1f} s; resident {before[rank][0] / 1e6:.1f} -> "
                f"{resident / 1e6:.1f} MB, {slope:.1f} bytes an iteration; descriptors {before[rank][1]} -> {descriptors}"
            )


def knock(port: int, until: threading.Event) -> int:
    knocks = 0
    while not until.wait(1 / STRANGERS_PER_SECOND):
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
        except OSError:
            pass
        knocks += 1
    return knocks


def strangers() -> None:
    """Iterations in equal times, in turns without and with strangers at rank 0's door."""
    counts: dict[bool, int] = {False: 0, True: 0}
    for _ in range(ROUNDS):
        for disturbed in (False, True):
            with job(each_with_a_server(2), sizes=(4 << 20,)) as running:
                running.all("iterate", WARM)
                over = threading.Event()
                thread = threading.Thread(target=knock, args=(running[0].port, over))
                if disturbed:
                    thread.start()
                for member in running.members:
                    member.begin("iterate_for", SECONDS)
                outcomes = [member.outcome() for member in running.members]
                over.set()
                if disturbed:
                    thread.join()
                assert [outcome.error for outcome in outcomes] == ["", ""]
                counts[disturbed] += outcomes[0].value - WARM
    print(
        f"{counts[False]} iterations of 4 MiB undisturbed, {counts[True]} with {STRANGERS_PER_SECOND} strangers a second: "
        f"{counts[True] / counts[False]:.3f}"
    )


if __name__ == "__main__":
    soak(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    strangers()
