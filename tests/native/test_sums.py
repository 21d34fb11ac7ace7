"""Sums by real processes: every dtype, size, number of workers and servers, packet size and schedule that hypothesis draws.

Processes are started once for each number of workers and are told what to do over pipes, so that an example costs a
connection and not an interpreter.
"""

from __future__ import annotations

import multiprocessing
import traceback
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradlane.core.plan import WIRES
from gradlane.transport import DTYPES, Node, NodeOptions

PATIENCE_S = 20
NUMPY = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "int8": np.int8, "uint8": np.uint8,
         "int32": np.int32, "int64": np.int64, "bfloat16": np.uint16}  # fmt: skip


def contribution(rank: int, index: int, length: int, dtype: str, arbitrary: bool) -> np.ndarray:
    draw = np.random.default_rng(1000 * rank + index)
    if arbitrary:
        numbers = draw.standard_normal(length) * 10.0 ** draw.integers(-3, 4)
        return to_bfloat16(numbers.astype(np.float32)) if dtype == "bfloat16" else numbers.astype(NUMPY[dtype])
    numbers = draw.integers(-8, 8, length)
    return to_bfloat16(numbers.astype(np.float32)) if dtype == "bfloat16" else numbers.astype(NUMPY[dtype])


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """To nearest, even between two; no NaN here."""
    bits = numbers.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(numbers: np.ndarray, dtype: str) -> np.ndarray:
    return (numbers.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else numbers.astype(np.float32)


def rank_order_sum(parts: list[np.ndarray], dtype: str) -> np.ndarray:
    """As a server adds: one after another; halves in float32, rounded once."""
    if dtype in ("float16", "bfloat16"):
        total = wide(parts[0], dtype)
        for part in parts[1:]:
            total = total + wide(part, dtype)
        return to_bfloat16(total) if dtype == "bfloat16" else total.astype(np.float16)
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def serve(pipe: Any) -> None:
    """A process that starts a node, runs what it is told and says what it holds."""
    while (todo := pipe.recv()) is not None:
        try:
            pipe.send(run(pipe, *todo))
        except Exception:
            pipe.send(traceback.format_exc())


def run(pipe: Any, options: NodeOptions, tensors: list[tuple[int, str]], how: dict[str, Any]) -> Any:
    with Node(options) as node:
        pipe.send(node.port)
        for server, port in enumerate(pipe.recv()):
            if server != options.server and options.rank is not None:
                node.dial(server, "127.0.0.1", port)
        node.join(PATIENCE_S)
        if options.rank is None:
            pipe.recv()  # the workers are done
            return None
        held = [contribution(options.rank, i, length, dtype, how["arbitrary"]) for i, (length, dtype) in enumerate(tensors)]
        for index, numbers in enumerate(held):
            node.define(
                index, numbers.ctypes.data, numbers.nbytes, tensors[index][1],
                wire=how["wire"], priority=len(held) - index,
            )  # fmt: skip
        for _ in range(how["iterations"]):
            for index, numbers in enumerate(held):
                numbers[:] = contribution(options.rank, index, *tensors[index], how["arbitrary"])
            order = np.random.default_rng(how["seed"] + options.rank).permutation(len(held))
            for index in order:
                node.push(int(index))
            done: list[int] = []
            while len(done) < len(held):
                done += node.take(PATIENCE_S)
        pipe.send([numbers.tobytes() for numbers in held])
        return pipe.recv()  # every other worker is done too


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("spawn")
    pipes, running = [], []
    for _ in range(6):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        pipes.append(ours)
        running.append(process)
    yield pipes
    for pipe in pipes:
        pipe.send(None)
    for process in running:
        process.join(PATIENCE_S)
        assert process.exitcode == 0


def sums(pipes, world, servers, external, tensors, how, **options):
    """What each worker holds after its iterations, as arrays."""
    roles = [(rank, rank if not external and rank < servers else None) for rank in range(world)]
    roles += [(None, server) for server in range(servers) if external]
    used = pipes[: len(roles)]
    for pipe, (rank, server) in zip(used, roles, strict=True):
        node = NodeOptions(world=world, servers=servers, rank=rank, server=server, tell_tables=external, linger_s=5, **options)
        pipe.send((node, tensors, how))
    ports = [receive(pipe) for pipe in used]
    of_servers = [port for port, (_, server) in zip(ports, roles, strict=True) if server is not None]
    for pipe in used:
        pipe.send(of_servers)
    held = [
        [np.frombuffer(data, NUMPY[dtype]) for data, (_, dtype) in zip(receive(pipe), tensors, strict=True)]
        for pipe in used[:world]
    ]
    for pipe in used:
        pipe.send(None)
    for pipe in used:
        assert receive(pipe) is None
    return held


def receive(pipe):
    assert pipe.poll(3 * PATIENCE_S), "a process said nothing"
    answer = pipe.recv()
    assert not isinstance(answer, str), answer
    return answer


TENSORS = st.lists(st.tuples(st.integers(1, 3_000), st.sampled_from(sorted(DTYPES))), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=st.integers(1, 4),
    servers=st.integers(1, 4),
    external=st.booleans(),
    tensors=TENSORS,
    packet_bytes=st.sampled_from([64, 640, 30_720]),
    wire=st.sampled_from(WIRES),
    rank_order=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sums_of_whole_numbers_are_exact_whatever_the_schedule(
    processes, world, servers, external, tensors, packet_bytes, wire, rank_order, seed
):
    servers = min(servers, 2 if external else world)
    how = {"wire": wire, "iterations": 2, "seed": seed, "arbitrary": False}
    held = sums(processes, world, servers, external, tensors, how, packet_bytes=packet_bytes, rank_order=rank_order)
    for index, (length, dtype) in enumerate(tensors):
        parts = [contribution(rank, index, length, dtype, False) for rank in range(world)]
        expected = rank_order_sum(parts, dtype)
        for of_worker in held:
            assert (of_worker[index] == expected).all()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=st.integers(2, 4),
    servers=st.integers(1, 4),
    tensors=TENSORS,
    packet_bytes=st.sampled_from([64, 30_720]),
    wire=st.sampled_from(WIRES),
    seed=st.integers(0, 99),
)
def test_in_rank_order_the_bits_are_those_of_adding_one_rank_after_another(
    processes, world, servers, tensors, packet_bytes, wire, seed
):
    how = {"wire": wire, "iterations": 1, "seed": seed, "arbitrary": True}
    held = sums(processes, world, min(servers, world), False, tensors, how, packet_bytes=packet_bytes, rank_order=True)
    for index, (length, dtype) in enumerate(tensors):
        parts = [contribution(rank, index, length, dtype, True) for rank in range(world)]
        expected = rank_order_sum(parts, dtype).tobytes()
        for of_worker in held:
            assert of_worker[index].tobytes() == expected
