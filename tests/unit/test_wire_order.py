"""The order on a connection: the reference against brute force, and both simulated fabrics against the vectors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.core.cluster import Cluster, Host, Link, Server, Worker
from gradlane.core.plan import WIRES, Message, Plan, Slice, Wire
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.schedule.wire_order import WireOrder, run_key
from gradlane.sim.fabric import Fabric, Job
from gradlane.sim.fluid import FluidFabric
from gradlane.sim.packets import PacketFabric
from tests.unit.wire_vectors import FILE, Enqueue, Operation, Sums, Take, Vector, answered, read, written

VECTORS = [each for each in read(FILE.read_text()) if each.wire != "pull-priority"]
BY_PACKET = st.sampled_from(("packet-fifo", "packet-priority"))
OPERATION = st.one_of(st.just(Take()), st.builds(Enqueue, st.integers(0, 3), st.integers(1, 4)))
OPERATIONS = st.lists(OPERATION, max_size=40)
GB = 10**9
PACKET = 8  # bytes, and nanoseconds on a link of a byte a nanosecond


def test_the_file_is_what_the_command_writes():
    assert FILE.read_text() == written()
    assert len(read(FILE.read_text())) == 59


@given(wire=st.sampled_from(WIRES), operations=OPERATIONS)
def test_the_reference_takes_what_a_search_of_all_that_waits_finds(wire: Wire, operations: list[Enqueue | Take]):
    order = WireOrder(wire)
    waiting: list[tuple[int, int, int]] = []  # (priority, run, packet), in order of hand-over
    runs = 0
    for operation in [*operations, *[Take()] * 200]:
        if isinstance(operation, Enqueue):
            assert order.enqueue(*operation) == runs
            waiting += [(operation.priority, runs, packet) for packet in range(operation.packets)]
            runs += 1
        elif waiting:
            least = min(priority for priority, _, _ in waiting)
            first = next(each for each in waiting if wire != "packet-priority" or each[0] == least)
            waiting.remove(first)
            assert order.take() == first[1:]
        assert bool(order) == bool(waiting)
    with pytest.raises(IndexError):
        order.take()


@given(operations=st.lists(st.one_of(OPERATION, st.builds(Sums, st.integers(0, 3), st.integers(1, 4))), max_size=40))
def test_sums_alone_by_priority_leave_where_first_in_first_out_has_sums(operations: list[Operation]):
    as_ever, by_priority = (answered(wire, operations) for wire in ("fifo", "pull-priority"))
    sums: set[int] = set()
    waiting: list[tuple[int, int, int]] = []  # (priority, run, packet) of sums
    runs = 0
    for here, there in zip(by_priority, as_ever, strict=True):
        if isinstance(here, Take):
            assert isinstance(there, Take)
            assert here == there or {here.run, there.run} <= sums  # what workers send leaves as ever
            if here.run in sums:
                waiting.sort()
                assert waiting.pop(0)[1:] == here
            continue
        if isinstance(here, Sums):
            sums.add(runs)
            waiting += [(here.priority, runs, packet) for packet in range(here.packets)]
        runs += 1
    assert not waiting


def test_a_key_is_the_urgency_and_then_the_number():
    for is_sum in (False, True):
        assert run_key("packet-priority", 5, 9, is_sum=is_sum) == (5, 9)
        assert run_key("packet-fifo", 5, 9, is_sum=is_sum) == run_key("fifo", 5, 9, is_sum=is_sum) == (0, 9)
        assert run_key("pull-priority", 5, 9, is_sum=is_sum) == (5 if is_sum else 0, 9)


# -- the fabrics --------------------------------------------------------------------------------------------
#
# A fabric tells when a whole message has been pushed, not each packet. That is enough: a link that is never idle sends the
# most urgent run in the first places after its hand-over, the next one in the first of the rest, and so on, so that a run
# which ends where the reference ends it has sent all of its packets where the reference does.


class Connection:
    """A worker and a server, and a plan with a message for each run of `vector` and one of a packet more, the last."""

    def __init__(self, vector: Vector, server_rate: int = GB) -> None:
        runs = [each for each in vector.operations if isinstance(each, Enqueue)] + [Enqueue(0, 1)]
        specs = tuple(TensorSpec(f"t{run}", PACKET * packets) for run, (_, packets) in enumerate(runs))
        messages = tuple(Message((Slice(run, 0, spec.size_bytes),), runs[run].priority) for run, spec in enumerate(specs))
        profile = Profile("runs", "none", tuple(TensorProfile(spec, 0, 0) for spec in specs), (Layer("only", 0),), 0)
        self.jobs = [Job(Plan("test", "runs", specs, messages, wire=vector.wire), profile)]
        hosts = (Host(Link(GB), Link(GB)), Host(Link(GB), Link(server_rate)))
        self.cluster = Cluster(hosts, (Worker(0),), (Server(1),), packet_bytes=PACKET)
        self.plug = len(runs) - 1


def run_to(fabric: Fabric, until_ns: int) -> list[tuple[int, int]]:
    """(message, time) of each push that ends by `until_ns`."""
    ends: list[tuple[int, int]] = []
    while notices := fabric.run(until_ns):
        ends += [(notice.message, notice.now_ns) for notice in notices if not notice.pulled]
    return ends


def in_the_flow(vector: Vector) -> list[tuple[int, int]]:
    """When each run ends in the fluid fabric, (run, time): a take is a packet's time, a run is handed over in no time."""
    connection = Connection(vector)
    fabric = FluidFabric(connection.jobs, connection.cluster)
    ends, now_ns, run = [], 0, 0
    for operation in vector.operations:
        if isinstance(operation, Enqueue):
            fabric.hand_over(now_ns, 0, run)
            run += 1
        else:
            now_ns += PACKET
            ends += run_to(fabric, now_ns)
    return ends


def in_packets(vector: Vector, server_rate: int) -> list[tuple[int, int]]:
    """When each run ends in the packet fabric, (run, time), counted from the end of a packet that is sent before all.

    The worker's link is never idle and takes a packet at each multiple of a packet's time; runs are handed over in the
    middle between two of them.
    """
    connection = Connection(vector, server_rate)
    fabric = PacketFabric(connection.jobs, connection.cluster, [(0, 0)], 0)
    fabric.hand_over(0, 0, connection.plug)
    ends, now_ns, run = [], 0, 0
    for operation in vector.operations:
        if isinstance(operation, Enqueue):
            fabric.hand_over(now_ns + PACKET // 2, 0, run)
            run += 1
        else:
            now_ns += PACKET
            ends += run_to(fabric, now_ns)
    ends += run_to(fabric, now_ns + PACKET)
    return [(message, end_ns - PACKET) for message, end_ns in ends if message != connection.plug]


def expected(vector: Vector) -> list[tuple[int, int]]:
    """When each run ends, (run, time), if each take is a packet's time."""
    takes = [each for each in vector.operations if isinstance(each, Take)]
    last = {take.run: PACKET * number for number, take in enumerate(takes, 1)}
    return sorted(last.items(), key=lambda end: end[1])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.name}-{vector.wire}")
def test_the_fluid_fabric_sends_what_the_vector_says(vector: Vector):
    assert in_the_flow(vector) == expected(vector)


@pytest.mark.parametrize("server_rate", [GB, 4 * GB])
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.name}-{vector.wire}")
def test_the_packet_fabric_sends_what_the_vector_says(vector: Vector, server_rate: int):
    assert in_packets(vector, server_rate) == expected(vector)


@given(wire=BY_PACKET, operations=OPERATIONS.filter(lambda each: any(isinstance(one, Enqueue) for one in each)))
def test_both_fabrics_send_what_the_reference_does(wire: Wire, operations: list[Enqueue | Take]):
    vector = Vector("drawn", wire, answered(wire, operations))
    assert in_the_flow(vector) == in_packets(vector, 3 * GB) == expected(vector)
