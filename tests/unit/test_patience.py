"""Patience: a step waits for late sums as long as deferring their updates would take, and less often where that is in vain."""

from __future__ import annotations

import itertools

import pytest

from gradlane.live.session.patience import Patience

pytestmark = pytest.mark.fast


def test_it_waits_longer_for_more_tensors_and_not_at_all_where_the_telling_costs_more():
    patience = Patience()
    assert 0 < patience.limit_ns(100, 0) < patience.limit_ns(200, 0)
    assert patience.limit_ns(100, 5) < patience.limit_ns(100, 0)
    assert patience.limit_ns(100, 100) == 0


def test_after_each_wait_in_vain_the_next_is_put_off_for_longer_up_to_a_limit():
    patience = Patience()
    waits = []
    for step in range(1000):
        if patience.limit_ns(100, 0):
            waits.append(step)
            patience.waited(in_vain=True)
    pauses = [later - earlier for earlier, later in itertools.pairwise(waits)]
    assert pauses[:7] == [2, 4, 8, 16, 32, 64, 64]
    assert set(pauses[5:]) == {64}


def test_a_wait_that_helped_is_followed_by_the_next_at_once():
    patience = Patience()
    for in_vain in (True, False):
        while not patience.limit_ns(100, 0):
            pass
        patience.waited(in_vain=in_vain)
    assert all(patience.limit_ns(100, 0) for _ in range(10))
