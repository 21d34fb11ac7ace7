"""Servers that update, from Python: a plain model beside real nodes, whose workers push in any order."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.errors import CapacityError, CommunicationError, InputError, MismatchError
from gradlane.transport import UNBOUNDED, Adam, Node, NodeOptions, Sgd

PATIENCE_S = 20
DESCENT = Sgd(lr=1.0)


def connected(stack: ExitStack, world: int, **options) -> list[Node]:
    """Nodes of this process, each a worker with a server."""
    nodes = [
        stack.enter_context(Node(NodeOptions(world=world, servers=world, rank=rank, server=rank, linger_s=0.1, **options)))
        for rank in range(world)
    ]
    for rank, node in enumerate(nodes):
        for other in range(world):
            if other != rank:
                node.dial(other, "127.0.0.1", nodes[other].port)
    for node in nodes:
        node.join(PATIENCE_S)
    return nodes


def define(nodes: list[Node], held: list[np.ndarray], rule=DESCENT, staleness: int = 0) -> None:
    """One tensor, whose first values are rank 0's."""
    for node, memory in zip(nodes, held, strict=True):
        node.define_updated(0, memory.ctypes.data, memory.nbytes, rule, staleness=staleness, group=0)
    for node in nodes:
        node.push(0)
    for node in nodes:
        node.wait(0, PATIENCE_S)


class Model:
    """Who may go on, and how many gradients of each worker are in the parameters."""

    def __init__(self, world: int, staleness: int) -> None:
        self.staleness = staleness
        self.pushes = [0] * world
        self.waits = [False] * world

    def push(self, rank: int) -> list[int]:
        """Who is answered when `rank` pushes once more."""
        self.pushes[rank] += 1
        self.waits[rank] = True
        answered = [
            rank for rank, waits in enumerate(self.waits) if waits and self.pushes[rank] <= min(self.pushes) + self.staleness
        ]
        for rank in answered:
            self.waits[rank] = False
        return answered


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 3),
    staleness=st.sampled_from([0, 1, 2, UNBOUNDED]),
    choices=st.lists(st.integers(0, 2), max_size=25),
    values=st.integers(3, 200),
)
def test_each_gradient_counts_once_and_nobody_is_further_ahead_than_the_bound(world, staleness, choices, values):
    model = Model(world, staleness)
    held = [np.full(values, 100.0 * (rank == 0), np.float32) for rank in range(world)]
    with ExitStack() as stack:
        nodes = connected(stack, world, packet_bytes=64)
        define(nodes, held, staleness=staleness)
        for memory in held:
            assert (memory == 100).all()
        for node in nodes:
            node.set_rule(0, DESCENT)
        for choice in choices:
            rank = choice % world
            if model.waits[rank]:
                assert not nodes[rank].is_done(0)
                continue
            held[rank][:] = 0
            held[rank][rank::3] = -1  # counts this worker's gradients there
            nodes[rank].push(0)
            for answered in model.push(rank):
                nodes[answered].wait(0, PATIENCE_S)
                for other in range(world):
                    # all packets of this push, and no fewer of the others' than the bound says
                    counts = held[answered][other::3] - 100
                    floor = model.pushes[answered] - staleness if other != answered else model.pushes[answered]
                    assert counts.min(initial=model.pushes[other]) >= floor
                    assert counts.max(initial=0) <= model.pushes[other]
            for rank, waits in enumerate(model.waits):
                assert waits <= (not nodes[rank].is_done(0))
            assert max(model.pushes) - min(model.pushes) <= staleness + 1


def test_a_server_that_has_not_the_memory_says_so_before_the_first_step():
    memory = np.zeros(1000, np.float32)
    with Node(NodeOptions(world=1, servers=1, rank=0, server=0, max_bytes=15_999)) as node:
        node.define_updated(0, memory.ctypes.data, memory.nbytes, Adam(lr=0.1), staleness=0, group=0)
        with pytest.raises(
            CapacityError,
            match=r"tensor 0 of 4000 bytes needs up to .* bytes of memory here: 0 others need 0, and 15999 are allowed",
        ):
            node.check()


def test_workers_with_other_learning_rates_in_one_iteration_all_hear_of_it():
    held = [np.ones(100, np.float32) for _ in range(2)]
    with ExitStack() as stack:
        nodes = connected(stack, 2)
        define(nodes, held)
        for rank, node in enumerate(nodes):
            node.set_rule(0, Sgd(lr=1.0 + rank))
            node.push(0)
        for node in nodes:
            with pytest.raises(
                MismatchError, match=r"parameter group 0: got lr [12] on rank [01] and [12] on rank [01], expected the same"
            ):
                node.wait(0, PATIENCE_S)


def test_a_rule_may_not_change_while_its_tensors_are_under_way():
    held = [np.ones(100, np.float32) for _ in range(2)]
    with ExitStack() as stack:
        nodes = connected(stack, 2)
        define(nodes, held)
        nodes[0].set_rule(0, DESCENT)
        nodes[0].push(0)
        nodes[0].set_rule(0, DESCENT)
        with pytest.raises(CommunicationError, match="its tensors are under way"):
            nodes[0].wait(0, PATIENCE_S)


def test_a_gradient_needs_a_rule():
    memory = np.ones(100, np.float32)
    with Node(NodeOptions(world=1, servers=1, rank=0, server=0)) as node:
        define([node], [memory])
        node.push(0)
        with pytest.raises(CommunicationError, match="its group has no rule of its kind"):
            node.wait(0, PATIENCE_S)


def test_numbers_that_no_optimizer_has_are_refused():
    with Node(NodeOptions(world=1, servers=1, rank=0, server=0)) as node:
        for rule in (Sgd(lr=-1.0), Sgd(lr=float("nan")), Adam(lr=0.1, betas=(0.9, 1.0))):
            with pytest.raises(InputError, match=r"a (learning rate|beta) that is not"):
                node.set_rule(0, rule)


def test_tensors_that_are_summed_go_beside_those_that_are_updated():
    sums = [np.full(5000, rank + 1, np.float32) for rank in range(2)]
    held = [np.zeros(3000, np.float32) for _ in range(2)]
    with ExitStack() as stack:
        nodes = connected(stack, 2)
        define(nodes, held, staleness=1)
        for node, memory in zip(nodes, sums, strict=True):
            node.define(1, memory.ctypes.data, memory.nbytes, "float32")
            node.set_rule(0, DESCENT)
        for node, memory in zip(nodes, held, strict=True):
            memory[:] = -1
            node.push(0)
            node.push(1)
        for rank, node in enumerate(nodes):
            node.wait(0, PATIENCE_S)
            node.wait(1, PATIENCE_S)
            assert (sums[rank] == 3).all()
            assert held[rank].min() >= 1
            assert held[rank].max() <= 2
