"""A trainer that is not installed is named, with what to do."""

from __future__ import annotations

import pytest

from gradlane.errors import UnsupportedError
from gradlane.integrations.installed import needs


def test_a_trainer_that_is_not_installed_is_a_typed_error_that_says_what_to_install() -> None:
    said = r"gradlane\.integrations\.no_such_trainer needs no_such_trainer, .*install it with: pip install no_such_trainer"
    with pytest.raises(UnsupportedError, match=said), needs("no_such_trainer"):
        import no_such_trainer  # noqa: F401


def test_what_pip_has_to_install_may_be_more_than_the_package() -> None:
    with (
        pytest.raises(UnsupportedError, match=r"pip install 'no_such_trainer\[train\]'$"),
        needs("no_such_trainer", "no_such_trainer[train]"),
    ):
        import no_such_trainer  # noqa: F401
