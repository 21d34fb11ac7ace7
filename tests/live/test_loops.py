"""Loops as people write them do under gradlane what they do under DDP, or are told why not."""

from __future__ import annotations

import pytest

from tests.live.loops import LOOPS


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_the_bits_of_ddp(two_ranks, name):
    outcomes = two_ranks.run("tests.live.loops:compare", name=name)
    for rank, outcome in enumerate(outcomes):
        for policy, found in outcome.items():
            assert found["differs"] == [], (rank, policy)
    for policy in ("bytescheduler", "blocks"):
        deferred = [outcome[policy]["deferred"] > 0 for outcome in outcomes]
        assert deferred == [LOOPS[name].defers] * 2, policy
        lines = outcomes[0][policy]["lines"]
        if LOOPS[name].says:
            assert len(lines) == 1
            assert LOOPS[name].says in lines[0]
        else:
            assert lines == []
        assert outcomes[1][policy]["lines"] == []
