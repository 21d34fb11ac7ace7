"""`auto` on links that change while it trains."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path

import msgspec
import pytest

from gradlane import lab
from gradlane.core.cluster import Link, RateStep
from gradlane.core.records.search_log import SearchLog
from gradlane.lab import HostSpec, LabSpec
from tests.lab.test_lab import HERE

LIMIT_SECONDS = 90
FAST, SLOW = 50_000_000, 12_500_000
EVERY_NS = 12 * 10**9  # up or down for so long, since nobody can say when the ranks will have begun


@pytest.mark.timing
@pytest.mark.extra
def test_links_that_carry_a_quarter_make_it_look_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    reason = lab.supported()
    if reason is not None:
        pytest.skip(reason)
    rates = cycle((SLOW, FAST))
    link = Link(FAST, tuple(RateStep(at * EVERY_NS, next(rates)) for at in range(1, LIMIT_SECONDS * 10**9 // EVERY_NS)))
    spec = LabSpec(2, FAST * 8, unlike=tuple(HostSpec(host, link, link) for host in range(2)))
    command = (sys.executable, str(HERE / "auto_job.py"), str(tmp_path / "auto.json"))
    assert lab.execute(spec, command, timeout=LIMIT_SECONDS).exit_codes == (0, 0)
    auto = msgspec.json.decode((tmp_path / "auto.json").read_bytes(), type=SearchLog)
    first, second = auto.looks[:2]
    assert first.why == "the job has begun"
    assert "messages take" in second.why or "iterations take" in second.why
    assert second.tried[0].choice == first.kept
    assert second.ended - second.began <= 50
