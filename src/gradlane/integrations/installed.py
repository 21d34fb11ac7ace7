"""Says what to install where a trainer is not."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from gradlane.errors import UnsupportedError


@contextlib.contextmanager
def needs(package: str, install: str = "") -> Iterator[None]:
    """Around the imports of `package` in the module of that name.

    Args:
        package: its name.
        install: what pip has to install, where that is more than `package`.

    Raises:
        UnsupportedError: one of them failed.
    """
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            f"gradlane.integrations.{package} needs {package}, which cannot be imported ({error}); install it with: "
            f"pip install {shlex.quote(install or package)}"
        ) from error
