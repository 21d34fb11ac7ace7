"""Script lines: which line of the script does what a session sees, for errors and warnings that name it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import cast

import torch

import gradlane

_GRADLANE, TORCH = (f"{Path(str(package.__file__)).parent}/" for package in (gradlane, torch))  # the folders of their files
_COMPILER = f"{TORCH}_dynamo/"  # wraps calls in functions of its own
_WRAPPERS = {"wrapper", "decorate_context"}  # of torch's decorators
_DECORATORS = ("typing_extensions.py", "functools.py", "contextlib.py")  # whose wrappers are called for others
_IMPORTS = "<frozen "  # what runs a module of gradlane's own as a script
_LIBRARIES = {"site-packages", "dist-packages"}  # folders of packages that the script imports


def source_line() -> str:
    """The line outside of gradlane and torch that runs now, by file, number and text; "torch" if there is none."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_GRADLANE, TORCH)):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.line})"
    return "torch"


def reader(of: str) -> str:
    """Who reads something now, as in "train.py:312 reads gradients (clip_grad_norm_)".

    A library that reads is named together with the line of the script that calls it, as in
    "accelerate/accelerator.py:2890 reads gradients (clip_grad_norm_) for train.py:88".

    Args:
        of: what is read.

    Returns:
        The innermost line outside of gradlane and torch, and in brackets the function of torch that it calls.
    """
    called = ""
    for frame in _stack(sys._getframe(1)):
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        if not (path.startswith((_GRADLANE, TORCH, _IMPORTS)) or path.endswith(_DECORATORS)):
            return f"{_place(frame)} reads {of}{called}{_for_script(frame)}"
        if path.startswith(TORCH) and not (path.startswith(_COMPILER) or name.startswith(("_", "<")) or name in _WRAPPERS):
            called = f" ({name})"  # the outermost is what the script calls
    return f"torch reads {of}{called}"


def is_inside_itself(code: CodeType, of: object) -> bool:
    """Whether a call of `code` with `of` as its `self` runs on this thread inside of another such call."""
    calls, frame = 0, cast(FrameType | None, sys._getframe())
    while frame is not None and calls < 2:
        calls += frame.f_code is code and frame.f_locals.get("self") is of
        frame = frame.f_back
    return calls == 2


def _for_script(frame: FrameType) -> str:
    if not _is_library(frame):
        return ""
    for outer in _stack(frame):
        if not (_is_library(outer) or outer.f_code.co_filename.startswith((_GRADLANE, TORCH, "<"))):
            return f" for {_place(outer)}"
    return ""


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    return not _LIBRARIES.isdisjoint(Path(frame.f_code.co_filename).parts)


def _place(frame: FrameType) -> str:
    """The file and the line: of a library from its package on, of the script by the file's name."""
    path = Path(frame.f_code.co_filename)
    depth = next((place + 1 for place, part in enumerate(path.parts) if part in _LIBRARIES), len(path.parts) - 1)
    return f"{'/'.join(path.parts[depth:])}:{frame.f_lineno}"
