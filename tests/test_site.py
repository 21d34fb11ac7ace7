"""The documentation's site: that it builds strictly, has every public name, and asks no other host for anything.

What needs MkDocs runs where `make docs` has installed it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import browser
from tests.commands import ROOT
from website import pages

needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="make docs installs MkDocs")
needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no Chromium")
SECONDS = 300
SHOWN = ("index", "tutorial", "concepts", "policies/blocks", "reference/python", "reference/commands", "overhead")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        "website/mkdocs.yml",
        "--site-dir",
        str(site),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_has_a_docstring_and_a_reference() -> None:
    assert "::: gradlane.live.startup.attach.attach" in pages.python()


def test_a_public_name_without_a_docstring_would_be_found() -> None:
    class Bare:
        """Has one."""

        @property
        def nothing(self) -> int:
            return 1

        def also(self) -> None: ...

    assert [name.rpartition(".")[2] for name in pages.undocumented(Bare)] == ["nothing", "also"]


@needs_mkdocs
@pytest.mark.parametrize(
    ("added", "told"),
    [("[to](nowhere.md)", "nowhere.md"), ("[to](training.md#nowhere)", "#nowhere"), ("[to](../src/nowhere.py)", "nowhere.py")],
)
def test_a_broken_link_ends_the_build(tmp_path: Path, added: str, told: str) -> None:
    for folder in ("docs", "website", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    with (tmp_path / "docs" / "concepts.md").open("a") as page:
        page.write(added)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert told in done.stderr


@needs_mkdocs
@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_open_from_disk_without_an_error_or_a_request(site: Path, width: int) -> None:
    with browser.page() as page:
        page.size(width, 900)
        for name in SHOWN:
            page.open(site / f"{name}.html", "document.readyState === 'complete' && document.querySelector('article') !== null")
            assert page.evaluate("[...document.images].every((image) => image.naturalWidth > 0)"), name
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), name
        assert page.said == []
        assert [url for url in page.asked_for if not url.startswith(("file:", "data:", "blob:"))] == []
