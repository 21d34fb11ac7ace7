"""What a package index and a type checker see of gradlane."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import gradlane
from tests.commands import ROOT

PACKAGE = ROOT / "src" / "gradlane"
# imported under another name than the distribution has, or brought by another one
DISTRIBUTIONS = {"sklearn": "scikit-learn", "scipy": "scikit-learn", "threadpoolctl": "scikit-learn"}


def required() -> dict[str, set[str]]:
    """The distributions of each extra, those that are always needed under ""."""
    found: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("gradlane") or ():
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        name = re.match(r"[\w.-]+", line)
        assert name is not None
        found.setdefault(extra[1] if extra else "", set()).add(name[0].lower())
    return found


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports from outside the standard library, except for type checkers."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "gradlane"}


def test_type_checkers_may_read_the_annotations():
    assert (PACKAGE / "py.typed").exists()


def test_there_is_one_version():
    assert importlib.metadata.version("gradlane") == gradlane.__version__
    assert re.search(r"^version *=", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) is None


def test_whatever_is_imported_comes_with_gradlane_or_with_an_extra():
    names = set().union(*(imported(path) for path in PACKAGE.rglob("*.py")))
    known = set().union(*required().values())
    assert {DISTRIBUTIONS.get(name, name) for name in names} - known == set()
    assert {"msgspec", "torch", "sklearn", "pyroute2"} <= names


def test_each_extra_that_an_error_names_is_there():
    extras = set(re.findall(r"gradlane\[(\w+)\]", "".join(path.read_text() for path in PACKAGE.rglob("*.py"))))
    assert extras
    assert extras <= set(required())
    assert "pyyaml" in required()["lab"]


def test_torch_is_only_installed_by_whoever_asks_for_it():
    assert [extra for extra, names in required().items() if "torch" in names] == ["torch"]


def test_the_readme_reads_without_the_repository():
    shown = importlib.metadata.metadata("gradlane").json["description"]
    assert isinstance(shown, str)
    assert "## Install" in shown
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", shown) if not link.startswith("https://")] == []


def test_the_picture_is_in_the_repositorys_readme_alone():
    """An index has no file that it could show."""
    picture = (ROOT / "README.md").read_text().partition("<!-- picture -->")[2].partition("<!-- end of picture -->")[0]
    (file,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", picture)
    assert (ROOT / file).exists()
    shown = importlib.metadata.metadata("gradlane").json["description"]
    assert isinstance(shown, str)
    assert "picture -->" not in shown
    assert file not in shown


def test_the_package_says_what_it_is_and_what_it_runs_on():
    about = importlib.metadata.metadata("gradlane")
    assert about["Keywords"]
    classifiers = about.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert "Operating System :: POSIX :: Linux" in classifiers
