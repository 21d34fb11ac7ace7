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
from tests.test_docs import commands, fault_of, faults_of, python_of
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


@pytest.mark.parametrize("name", pages.policy_names())
def test_commands_and_code_on_a_policys_page_are_there(name: str, tmp_path: Path) -> None:
    # the simulations that it shows are run while the page is made
    page = tmp_path / "page.md"
    page.write_text(pages.policy(name))
    found = list(commands(str(page)))
    assert [command.words[1] for command in found] == ["simulate"] * len(pages.CASES) + ["launch"]
    assert [fault for command in found if (fault := fault_of(command.words))] == []
    ((_, code),) = python_of(str(page))
    assert list(faults_of(code)) == []


@needs_mkdocs
def test_broken_links_end_the_build(tmp_path: Path) -> None:
    for folder in ("docs", "website", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("src", "native", "bench", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "concepts.md").open("a") as page:
        page.write("[a](nowhere.md) [b](training.md#nowhere) [c](../src/nowhere.py)")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for told in ("'nowhere.md'", "#nowhere", "nowhere.py"):
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
        page.open(site / "index.html", "document.readyState === 'complete' && document.querySelector('article img') !== null")
        left, right = page.evaluate(
            "(({ left, right }) => [left, right])(document.querySelector('article img').getBoundingClientRect())"
        )
        assert 0 <= left < right <= width  # the picture that the documentation begins with is whole
        assert page.said == []
        assert [url for url in page.asked_for if not url.startswith(("file:", "data:", "blob:"))] == []
