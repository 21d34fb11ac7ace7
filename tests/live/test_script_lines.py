from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import gradlane
from gradlane.live.session.pending_gradient import PendingGradient
from gradlane.live.session.script_lines import reader
from gradlane.live.session.tracked import Tracked


def said(use: Callable[[torch.nn.Parameter], object]) -> str:
    """What is said of `use`, which is given a parameter whose gradient waits for its sum."""
    lines: list[str] = []
    path = Path(str(gradlane.__file__)).with_name("session.py")  # no line of the script
    notes = function_of(str(path), 2, "given[1].append(given[0]('gradients'))")
    slot, param = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    # its norm is not known before the sum
    reads: Any = SimpleNamespace(
        read=partial(notes, reader, lines), norms=lambda *_: {}, puts_off=lambda several, _: set(several)
    )
    param.grad = PendingGradient(slot, Tracked("weight", param, 0), reads, lambda wrapper, given: slot)
    use(param)
    return lines[0]


def function_of(path: str, line: int, text: str) -> Any:
    """`use` as `text`, the only line of a function, defines it at that line of that file."""
    names: dict[str, Any] = {"torch": torch, "sys": sys}
    exec(compile("\n" * (line - 2) + f"def use(*given):\n    return {text}", path, "exec"), names)
    return names["use"]


def test_a_reader_is_the_line_of_the_script_and_the_function_of_torch_that_it_calls():
    clips = function_of("/home/me/train.py", 312, "torch.nn.utils.clip_grad_norm_(given, 1.0)")
    assert said(clips) == "train.py:312 reads gradients (clip_grad_norm_)"


def test_an_operation_of_the_script_names_its_line():
    assert said(function_of("/home/me/train.py", 7, "given[0].grad + 1")) == "train.py:7 reads gradients"


def test_what_the_compiler_wraps_a_call_in_is_no_function_that_the_script_calls():
    copies = function_of("/home/me/train.py", 7, "torch._dynamo.disable(torch.clone, recursive=False)(given[0].grad)")
    assert said(copies) == "train.py:7 reads gradients"


def test_a_library_is_named_with_the_line_of_the_script_that_calls_it():
    clips = function_of("/env/site-packages/accelerate/accelerator.py", 2890, "torch.nn.utils.clip_grad_norm_(given, 1.0)")
    calls = function_of("/home/me/train.py", 88, "given[0](given[1])")
    expected = "accelerate/accelerator.py:2890 reads gradients (clip_grad_norm_) for train.py:88"
    assert said(lambda param: calls(clips, param)) == expected


def test_this_test_is_a_script_too():
    line = sys._getframe().f_lineno + 1
    assert said(lambda param: float(param.grad.sum())) == f"test_script_lines.py:{line} reads gradients"
