"""The fast set, and how properties are tried.

`pytest -m fast` (`make fast`) runs what takes less than a minute in all and imports no torch: the tests of tests/unit that are
not marked slow. Other folders are not even collected then, and an import of torch is an error.

Properties are tried on the same examples in every run and have no deadline, so that neither the day nor the load of the machine
decides whether they pass.
`HYPOTHESIS_PROFILE=default python -m pytest tests/unit` looks for new ones.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import settings

from tests import processes

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

HERE = Path(__file__).parent
FAST = HERE / "unit"


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests' processes leave among temporary files (torchrun a folder of each job) goes when pytest's own does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)  # found anew, from TMPDIR
        yield


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Ctrl-C and Ctrl-\\ do what they do in a terminal: a script that starts the tests with `&` has them ignored."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _ends_with_the_test() -> Iterator[None]:
    """What a test starts ends with it, failed or not; what fixtures of a wider scope have started does not."""
    with processes.ended():
        yield


class _NoTorch(Loader):
    """Refuses the import of torch, so that it is found out who asks for it; whether torch is there may be asked."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec: ModuleSpec) -> None:
        raise ImportError(
            "a test of the fast set imports torch: mark it slow, or import torch where it is needed", name=spec.name
        )

    def exec_module(self, module: object) -> None: ...


def _fast_only(config: pytest.Config) -> bool:
    return str(config.option.markexpr) == "fast"


def pytest_configure(config: pytest.Config) -> None:
    if _fast_only(config):
        sys.meta_path.insert(0, _NoTorch())  # type: ignore[arg-type]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    outside = collection_path.is_dir() and collection_path != HERE and not collection_path.is_relative_to(FAST)
    return True if _fast_only(config) and outside and collection_path.is_relative_to(HERE) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_rows(items)
    for item in items:
        if item.path.is_relative_to(FAST) and not any(item.iter_markers("slow")):
            item.add_marker(pytest.mark.fast)


def _leave_rows(items: list[pytest.Item]) -> None:
    """Mark `extra` what `make test` leaves to `make test-all`: of each matrix all rows but the first of a kind."""
    seen = set()
    for item in items:
        matrix = item.get_closest_marker("matrix")
        if matrix is None or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        kind = matrix.kwargs.get("by", _backend)(item.callspec.params)
        row = (item.path, item.originalname, kind)
        if row in seen:
            item.add_marker(pytest.mark.extra)
        seen.add(row)


def _backend(row: Mapping[str, object]) -> object:
    return row.get("backend")
