"""What the shell is told to offer at Tab."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from gradlane import zoo
from gradlane.cli import main
from gradlane.planning import catalog


def offered(*words: str) -> list[str]:
    """The completions of the last of `words`; "file" for those that the shell finds itself."""
    *before, incomplete = words
    found = ShellComplete(main, {}, "gradlane", "_GRADLANE_COMPLETE").get_completions(before, incomplete)
    return ["file" if item.type == "file" else item.value for item in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pro"], ["probe", "profile"]),
        (["plan", "vgg"], ["vgg16", "vgg16-cifar10", "vgg19"]),
        (["plan", "out/"], ["file"]),
        (["plan", "vgg16", "--policy", "by"], ["bytescheduler"]),
        (["plan", "vgg16", "--policy", "own.py"], ["file"]),
        (["plan", "vgg16", "--device", "v"], ["v100", "v100-sxm"]),
        (["simulate", "vgg16", "bert"], ["bert-base", "bert-large"]),
        (["whatif", "rates", "alex"], ["alexnet"]),
        (["compare", "--policies", "auto,p3,merc"], ["auto,p3,mercury", "auto,p3,mercury-no-preemption"]),
        (["compare", "--backend", "all-reduce,"], ["all-reduce,all-reduce", "all-reduce,server", "all-reduce,any"]),
        (["launch", "--sum"], ["--summation-order"]),
        (["launch", "--nproc", "2", "--policy", "au"], ["auto"]),
        (["launch", "--backend", ""], ["all-reduce", "server"]),
        (["launch", "--nproc", "2", "tr"], ["file"]),
        (["launch", "train.py", "--ep"], []),
    ],
    ids=" ".join,
)
def test_what_begins_so_is_offered(words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_all_models_and_policies_are_offered() -> None:
    assert offered("plan", "") == list(zoo.names())
    assert offered("plan", "vgg16", "--policy", "") == list(catalog.names())
