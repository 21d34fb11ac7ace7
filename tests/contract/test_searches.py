"""What every search of gradlane promises."""

from __future__ import annotations

from functools import partial

import pytest

from gradlane.planning import search
from gradlane.testing.searches import check_search


@pytest.mark.parametrize("name", search.NAMES)
def test_every_search_keeps_the_promises_of_searches(name):
    check_search(partial(search.start, name))
