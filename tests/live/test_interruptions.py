"""A handler of a signal sees the values of one whole step, wherever it interrupts a session, and changes nothing."""

from __future__ import annotations

import pytest

from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix(by=lambda params: None)  # a handler for every line: half a minute over all-reduce


@pytest.mark.parametrize("backend", ["server", "all-reduce"])
def test_a_signal_handler_that_reads_everything_may_come_at_every_line(two_ranks: Ranks, backend: str) -> None:
    for lines, mixed, deferred, equal in two_ranks.run("tests.live.interrupted:at_every_line", backend=backend):
        assert lines > 200
        assert mixed == 0
        assert deferred > 100
        assert equal


def test_a_child_that_is_forked_after_the_job_has_failed_refuses_what_lacks_its_update():
    ranks = Ranks(2)
    try:
        for owed, told in ranks.run("tests.live.interrupted:forked_after_a_failure"):
            assert owed > 0
            assert "lacks its update of the last step" in told
    finally:
        ranks.close()
