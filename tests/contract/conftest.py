"""Ranks that live as long as the tests of one file: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.ranks import Ranks


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()
