"""Examples of the order on a connection. `python -m tests.unit.wire_vectors` writes them to tests/golden/wire_order.txt.

The inputs are below, some by hand and some drawn from fixed seeds; the packets that must leave come from the reference,
`gradlane.schedule.wire_order.WireOrder`. The file is read by `tests/unit/test_wire_order.py` (the simulated fabrics) and by
`native/tests/packet_queue_test.cc` (the data plane). Its lines, of words separated by blanks:

    vector NAME WIRE            a new connection; WIRE is "packet-fifo", "packet-priority" or "pull-priority"
    enqueue PRIORITY PACKETS    hand over the next run; runs count from 0
    sums PRIORITY PACKETS       the same of a run that a server sends; with "pull-priority" alone
    take RUN PACKET             the sender takes a packet: it must be this one of this run, both counted from 0

Other lines are empty or begin with "#". At the end of a vector nothing waits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gradlane.core.plan import Wire
from gradlane.schedule.wire_order import WireOrder

FILE = Path(__file__).parent.parent / "golden" / "wire_order.txt"
HEADER = """\
# Which packet a connection sends next: see src/gradlane/schedule/wire_order.py, and tests/unit/wire_vectors.py for the
# format and the command that makes this file.
"""


class Enqueue(NamedTuple):
    """A run is handed over."""

    priority: int
    packets: int


class Sums(NamedTuple):
    """A run that a server sends is handed over."""

    priority: int
    packets: int


class Take(NamedTuple):
    """A packet is taken. In inputs, which of them is not yet known: both fields are -1."""

    run: int = -1
    packet: int = -1


Operation = Enqueue | Sums | Take


class Vector(NamedTuple):
    """One connection's operations."""

    name: str
    wire: Wire
    operations: tuple[Operation, ...]


def answered(wire: Wire, operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """`operations` with the reference's packets in each `Take`, and more takes until nothing waits.

    A take for which nothing waits is left out.
    """
    order = WireOrder(wire)
    done: list[Operation] = []
    for operation in operations:
        if not isinstance(operation, Take):
            order.enqueue(*operation, is_sum=isinstance(operation, Sums))
            done.append(operation)
        elif order:
            done.append(Take(*order.take()))
    while order:
        done.append(Take(*order.take()))
    return tuple(done)


def by_hand() -> Iterator[tuple[str, list[Enqueue | Take]]]:
    """The cases that the specification names."""
    take = Take()
    yield "one-run", [Enqueue(7, 4)]
    yield "ties-go-by-hand-over", [Enqueue(3, 2), Enqueue(3, 3), take, Enqueue(3, 1)]
    yield "the-most-urgent-first", [Enqueue(2, 2), Enqueue(0, 2), Enqueue(1, 2)]
    yield "preempted-between-packets", [Enqueue(5, 4), take, take, Enqueue(1, 2)]
    yield "less-urgent-does-not-preempt", [Enqueue(1, 3), take, Enqueue(5, 2), take]
    yield "preempted-keeps-its-place", [Enqueue(5, 3), take, Enqueue(1, 1), Enqueue(5, 2), take, take]
    yield "preempted-again-and-again", [Enqueue(9, 3), take, Enqueue(6, 3), take, Enqueue(3, 3), take, Enqueue(0, 3), take]
    yield "idle-in-between", [Enqueue(4, 1), take, Enqueue(8, 2), take, take, Enqueue(0, 1)]
    yield "the-least-urgent-there-is", [Enqueue(2**31 - 1, 2), take, Enqueue(0, 1), Enqueue(2**31 - 1, 1)]


def with_sums() -> Iterator[tuple[str, list[Operation]]]:
    """The cases that the specification names for sums that are ordered among themselves."""
    take = Take()
    yield "what-workers-send-goes-in-turn", [Enqueue(2, 2), Enqueue(0, 2), take, Enqueue(1, 1)]
    yield "the-most-urgent-sum-first", [Sums(2, 2), Sums(0, 2), Sums(1, 2)]
    yield "a-sum-is-preempted-between-packets", [Sums(5, 3), take, Sums(1, 2), take, Sums(5, 1)]
    yield "an-urgent-sum-takes-a-sum's-place", [Enqueue(0, 2), Sums(7, 1), Enqueue(0, 1), Sums(1, 1), Enqueue(0, 1)]
    yield "no-place-is-left-over", [Sums(7, 2), Enqueue(0, 1), take, Sums(1, 1), take, take, take, Sums(3, 1), Enqueue(9, 1)]
    for seed in range(12):
        kinds = random.Random(seed + 100).random
        yield f"drawn-{seed}", [Sums(*each) if isinstance(each, Enqueue) and kinds() < 0.5 else each for each in drawn(seed)]


def drawn(seed: int) -> list[Enqueue | Take]:
    """Forty operations, the same for the same seed in every version of Python."""
    draw = random.Random(seed).random
    return [Take() if draw() < 0.6 else Enqueue(int(draw() * 4), 1 + int(draw() * 5)) for _ in range(40)]


def vectors() -> Iterator[Vector]:
    """All vectors: each with and without priorities, and those with sums."""
    wires: tuple[Wire, ...] = ("packet-priority", "packet-fifo")
    for wire in wires:
        for name, operations in by_hand():
            yield Vector(name, wire, answered(wire, operations))
        for seed in range(12):
            yield Vector(f"drawn-{seed}", wire, answered(wire, drawn(seed)))
    for name, mixed in with_sums():
        yield Vector(name, "pull-priority", answered("pull-priority", mixed))


def written() -> str:
    """The file's text."""
    lines = [HEADER]
    for vector in vectors():
        lines.append(f"\nvector {vector.name} {vector.wire}\n")
        lines += [f"{type(each).__name__.lower()} {each[0]} {each[1]}\n" for each in vector.operations]
    return "".join(lines)


def read(text: str) -> list[Vector]:
    """The vectors of a file's text."""
    found: list[Vector] = []
    for line in text.splitlines():
        match line.split():
            case ["vector", name, ("packet-fifo" | "packet-priority" | "pull-priority") as wire]:
                found.append(Vector(name, wire, ()))
            case ["enqueue", priority, packets]:
                found[-1] = found[-1]._replace(operations=(*found[-1].operations, Enqueue(int(priority), int(packets))))
            case ["sums", priority, packets]:
                found[-1] = found[-1]._replace(operations=(*found[-1].operations, Sums(int(priority), int(packets))))
            case ["take", run, packet]:
                found[-1] = found[-1]._replace(operations=(*found[-1].operations, Take(int(run), int(packet))))
            case [first, *_] if not first.startswith("#"):
                raise ValueError(f"not a line of wire vectors: {line}")
    return found


if __name__ == "__main__":
    FILE.write_text(written())
