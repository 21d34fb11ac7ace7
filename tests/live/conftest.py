"""Ranks that live as long as the test session: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()
