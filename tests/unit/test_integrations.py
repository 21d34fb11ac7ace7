"""A trainer that is not installed is named, with what to do."""

from __future__ import annotations

import pytest

from gradlane.errors import UnsupportedError
from gradlane.plugin.installed import needs


def test_a_trainer_that_is_not_installed_is_a_typed_error_that_says_what_to_install() -> None:
    said = r"gradlane\.integrations\.no_such needs no_such_trainer, .*install it with: pip install 'gradlane\[no_such\]'"
    with (
        pytest.raises(UnsupportedError, match=said),
        needs("no_such_trainer", "gradlane.integrations.no_such", "gradlane[no_such]"),
    ):
        import no_such_trainer  # noqa: F401
