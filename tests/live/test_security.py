"""Where ranks listen: docs/security.md."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("backend", [None, "all-reduce", "server"])
def test_a_session_listens_on_one_address_and_on_nothing_once_it_is_closed(two_ranks, backend):
    outcomes = two_ranks.run("tests.live.listeners:of_a_session", backend=backend)
    for rank, (during, after) in enumerate(outcomes):
        assert {address for address, _ in during} <= {"127.0.0.1"}
        # the control channel on rank 0; a process group of its own; a node unless over all-reduce
        assert len(during) == (rank == 0) + 1 + (backend != "all-reduce")
        assert not after
