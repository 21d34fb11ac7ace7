"""What owners tell of their sums, on one rank and without a network: batches of norms, in every order of ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradlane
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.live.backends import norms as told_norms
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.norms import Norms, NormsExchange, owners_of
from gradlane.planning.plans import make_plan
from gradlane.testing.generators import profile_of

_SIZES = [300, 5000, 40, 2500, 7000, 1, 900, 3000]
_RANK, _WORLD = 1, 2


class _Owner:
    """Rank 1 of two, with sums in its slots, whose first phases have not ended.

    Attributes:
        norms, exchange: under test. The other rank adds nothing.
        told: of what `ended` was told, in order.
        ended: to be called at the end of a message's first phase.
    """

    def __init__(self) -> None:
        params = [torch.nn.Parameter(torch.empty(size)) for size in _SIZES]
        profile = profile_of(*((1000 * index, 4 * size) for index, size in enumerate(_SIZES)))
        policy = gradlane.policies.get("owners", least_bytes=64, most_bytes=9000)
        self.plan = make_plan(policy, profile, Place(Network.line(_WORLD, 10_000, 10**9)))
        self.buffers = GradientBuffers(params)
        for index, slot in enumerate(self.buffers.slots):
            slot.copy_(torch.arange(slot.numel()).remainder(13).add(index))
        self.norms = Norms(self.plan, self.buffers.message_buffers(self.plan), _RANK, _WORLD)
        self.exchange = NormsExchange(self.norms, lambda memory, then: then(None))
        self.told: list[tuple[int, BaseException | None]] = []
        self.ended = self.exchange.once_there(lambda message, error: self.told.append((message, error)))

    def expected(self, factor: float) -> torch.Tensor:
        own = [owner == _RANK for owner in owners_of(self.plan).ranks]
        sums = [slot * each for slot, each in zip(self.buffers.slots, own, strict=True)]
        first = torch.stack(torch._foreach_norm(sums)).double()
        second = torch.stack(torch._foreach_norm([each * factor for each in sums])).double() * (factor != 1)
        return torch.cat((first, second, torch.tensor([0.0, factor])))


@given(
    order=st.randoms(use_true_random=False), batch_bytes=st.sampled_from([1, 6000, 10**6]), factor=st.sampled_from([1.0, 0.125])
)
@settings(max_examples=50)
def test_norms_are_told_once_behind_the_last_end_whatever_the_order_of_ends_and_the_batches(order, batch_bytes, factor):
    rank = _Owner()
    messages = list(range(len(rank.plan.messages)))
    assert len(messages) > 3
    for iteration in range(2):
        rank.norms.next_factor = factor
        rank.norms.begin()
        order.shuffle(messages)
        with patch.object(told_norms, "_BATCH_BYTES", batch_bytes):
            for count, message in enumerate(messages):
                assert not rank.norms.are_there
                rank.ended(message, None)
                assert rank.told[iteration * len(messages) :] == [(each, None) for each in messages[: count + 1]]
        assert rank.norms.are_there
        assert rank.norms.memory.equal(rank.expected(factor))


def test_a_batch_that_another_thread_computes_is_waited_for():
    rank = _Owner()
    first = next(message for message, owned in enumerate(rank.norms.owned) if owned)
    rest = [message for message in range(len(rank.plan.messages)) if message != first]
    is_computing, may_end = threading.Event(), threading.Event()
    compute: Callable[..., None] = rank.norms.compute

    def held(batch: list[int]) -> None:
        if batch == [first]:
            is_computing.set()
            may_end.wait(20)
        compute(batch)

    with patch.object(told_norms, "_BATCH_BYTES", 1), patch.object(rank.norms, "compute", held):
        other = threading.Thread(target=rank.ended, args=(first, None))
        other.start()
        assert is_computing.wait(20)
        for message in rest:
            rank.ended(message, None)
        assert [message for message, _ in rank.told] == [first, *rest[:-1]]
        assert not rank.norms.are_there
        may_end.set()
        other.join(20)
    assert rank.told[-1] == (rest[-1], None)
    assert rank.norms.memory.equal(rank.expected(1.0))


@pytest.mark.parametrize("failing", [0, -1])
def test_an_error_of_any_batch_is_told_with_the_last_message(failing):
    rank = _Owner()
    messages = list(range(len(rank.plan.messages)))
    owning = [message for message in messages if rank.norms.owned[message]]
    compute: Callable[..., None] = rank.norms.compute

    def fails(batch: list[int]) -> None:
        if owning[failing] in batch:
            raise MemoryError("no memory for norms")
        compute(batch)

    with patch.object(told_norms, "_BATCH_BYTES", 1), patch.object(rank.norms, "compute", fails):
        for message in messages:
            rank.ended(message, None)
    assert [error for _, error in rank.told[:-1]] == [None] * (len(messages) - 1)
    assert isinstance(rank.told[-1][1], MemoryError)
    assert not rank.norms.are_there
