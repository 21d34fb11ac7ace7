"""Every test here builds real namespaces; where the kernel forbids them, all are skipped with its reason."""

from __future__ import annotations

import pytest

from gradlane import lab


@pytest.fixture(scope="session", autouse=True)
def _lab_is_supported() -> None:
    reason = lab.supported()
    if reason is not None:
        pytest.skip(reason)
