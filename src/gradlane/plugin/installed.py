"""Says what to install where a library that a module of gradlane is for is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradlane.errors import UnsupportedError


@contextlib.contextmanager
def needs(package: str, module: str, install: str | None = None) -> Iterator[None]:
    """Around the imports of `package` in a module that is for it.

    Args:
        package: what is imported.
        module: the module's name.
        install: what pip installs; None for `package`.

    Raises:
        UnsupportedError: one of them failed.
    """
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            f"{module} needs {package}, which cannot be imported ({error}); install it with: pip install '{install or package}'"
        ) from error
