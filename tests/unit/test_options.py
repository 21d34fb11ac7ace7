"""What commands refuse before they do anything, each with exit code 2 and the name of what is wrong."""

from __future__ import annotations

import re
import sys

import pytest

from gradlane.cli.inputs.types import make_folder
from tests.commands import invoke

NOWHERE = "/proc/gradlane"  # even root can make no file and no folder there


@pytest.mark.parametrize(
    ("command", "option", "expected"),
    [
        (["compare"], ["--hosts", 1], "--hosts: got '1', expected 2 to"),
        (["compare"], ["--turns", 0], "got '0', expected an integer from 1"),
        (["compare"], ["--steps", -1], "got '-1', expected an integer from 1"),
        (["compare"], ["--batch-size", 0], "got '0', expected an integer from 1"),
        (["compare", "vgg16"], ["--batch-size", 8], "got it with a MODEL"),
        (["compare", "vgg16"], ["--servers", -1], "got '-1', expected an integer from 0"),
        (["compare", "vgg16"], ["--scale", "nan"], "got 'nan', expected a factor, more than zero"),
        (["compare"], ["--timeout", 0], "got '0', expected seconds, more than zero"),
        (["probe"], ["--hosts", 1], "got '1', expected an integer from 2"),
        (["probe"], ["--seconds", -1], "got '-1', expected seconds, more than zero"),
        (["probe"], ["--seconds", "inf"], "got 'inf', expected seconds, more than zero"),
        (["probe"], ["--ranks-per-host", 0], "got '0', expected an integer from 1"),
        (["probe"], ["--algorithm", "hierarchical"], "expected hosts of several ranks"),
        (["probe"], ["--classes", 9], "got '9', expected an integer from 1 to 8"),
        (["profile", __file__], ["--nproc", 0], "got '0', expected an integer from 1"),
        (["lab", "true"], ["--hosts", 0], "got '0', expected an integer from 1"),
        (["lab", "true"], ["--classes", 0], "got '0', expected an integer from 1 to 8"),
        (["lab", "true"], ["--scale", 0], "got '0', expected a factor, more than zero"),
        (["lab", "true"], ["--timeout", -1], "got '-1', expected seconds, more than zero"),
        (["plan", "vgg16"], ["--batch", 0], "got '0', expected an integer from 1"),
        (["zoo", "vgg16"], ["--batch", "two"], "got 'two', expected an integer from 1"),
        (["server", "host:1"], ["--memory", 0], "got '0', expected one byte or more"),
        (["server", "host:1"], ["--memory", "much"], "--memory: got 'much', expected a number and a unit"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(command: list[str], option: list[object], expected: str) -> None:
    name, *arguments = command
    text = " ".join(invoke(name, *option, *arguments, code=2).split())
    assert expected in text
    assert str(option[0]) in text


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--loopback", "--out", NOWHERE],
        ["compare", "vgg16", "--out", NOWHERE],
        ["profile", "--out", NOWHERE, __file__],
        ["probe", "--out", NOWHERE],
        ["plan", "vgg16", "--out", NOWHERE],
        ["zoo", "vgg16", "--out", NOWHERE],
        ["lab", "--write", NOWHERE, "true"],
        ["lab", "--link", "1gbit", "--samples", NOWHERE, "true"],
    ],
)
def test_a_file_or_folder_that_cannot_be_written_is_refused_first(command: list[str]) -> None:
    text = " ".join(invoke(*command, code=2).split())
    assert f"got '{NOWHERE}'" in text
    assert "No such file or directory" in text


def test_a_folder_to_write_is_made_with_those_above_it(tmp_path) -> None:
    make_folder("--out", tmp_path / "a" / "b")
    make_folder("--out", tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        (["polices"], "policies"),
        (["what-if"], "whatif"),
        (["plan", "vg16"], "vgg16"),
        (["simulate", "resnet-50"], "resnet50"),
        (["plan", "VGG16"], "vgg16"),
        (["plan", "vgg16", "--device", "v10"], "v100"),
        (["plan", "vgg16", "--policy", "bytescedular"], "bytescheduler"),
        (["plan", "vgg16", "--policy", "p3", "--knob", "slice_byte=64"], "slice_bytes"),
        (["plan", "vgg16", "--policy", "searched", "--knob", "sed=1"], "seed"),
        (["compare", "--policies", "merkury"], "mercury"),
        (["profile", "--nprok", 2, "train.py"], "--nproc"),
        (["lab", "--togethr", "true"], "--together"),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(command: list[object], meant: str) -> None:
    assert re.search(rf"[Dd]id you mean '?{meant}\b", invoke(*command, code=2))


@pytest.mark.parametrize("command", [("profile", __file__), ("advise", __file__), ("probe",), ("compare", "--loopback")])
def test_without_torch_a_command_that_needs_it_says_so_in_one_line(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    said = f"gradlane: {command[0]} needs torch, which is not installed; install it with: pip install 'gradlane[torch]'\n"
    assert invoke(*command, code=1) == said


@pytest.mark.parametrize("command", [("profile", __file__), ("probe",), ("compare", "--loopback")])
def test_a_command_that_starts_ranks_is_refused_where_it_is_one_itself(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = invoke(*command, code=2)
    assert said.startswith("gradlane: RANK, WORLD_SIZE: got 0 of 2, ")
    assert said.endswith(f"gradlane {command[0]} starts ranks of its own\n")


def test_a_word_that_is_like_none_gets_no_suggestion() -> None:
    text = invoke("plan", "vgg16", "--policy", "xyz", code=2)
    assert "did you mean" not in text
    assert "got 'xyz', expected one of wfbp" in text
