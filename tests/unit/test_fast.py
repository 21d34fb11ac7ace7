"""The fast set stays what tests/conftest.py says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT


def fast(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-m", "fast", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_it_is_collected_where_torch_cannot_be_imported_and_has_tests_of_unit_only() -> None:
    done = fast("--collect-only")
    assert done.returncode == 0, done.stdout
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) > 500
    assert all(test.startswith("tests/unit/") for test in tests)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch", "torch.nn.functional"])
def test_an_import_of_torch_by_one_of_its_tests_is_an_error(tmp_path: Path, module: str) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", folder.parent)
    (folder / "test_one.py").write_text(f"def test_it():\n    import {module}\n\ndef test_another():\n    pass\n")
    done = fast("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(folder.parent))
    assert done.returncode == 1, done.stdout
    assert "the fast set imports torch" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
