"""The stages of a script that is measured under its own DDP, and the line by which rank 0 says which one runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, TextIO

from gradlane.units import format_ns


class Stage(NamedTuple):
    """What some steps are for.

    Attributes:
        first: its first step; of a stage between two steps, the second of these.
        steps: how many it has; 0 between two steps.
        text: for people.
    """

    first: int
    steps: int
    text: str


class Progress:
    """Says on a stream which stage runs: a line a stage, which a terminal keeps up to date step by step.

    Args:
        stages: in order.
        stream: stderr by default.
    """

    def __init__(self, stages: Sequence[Stage], stream: TextIO | None = None) -> None:
        self._stages, self._stream = stages, stream or sys.stderr
        self._now: Stage | None = None
        self._is_open = False  # a line of a terminal is to be written over
        self._shows_steps = self._stream.isatty()

    def show(self, step: int, ends_ns: Sequence[int], *, between: bool = False) -> None:
        """Say what runs now.

        Args:
            step: the one that begins.
            ends_ns: when each step ended that has, in ns.
            between: the stage that comes before this step, between two steps, begins.
        """
        stage = next(each for each in reversed(self._stages) if each.first <= step and (each.steps == 0) == between)
        if stage is not self._now:
            self.end()
            self._now = stage
        elif not self._shows_steps:
            return
        done = step - stage.first
        # a stage between two steps, if one has just been, is no part of the step after it
        before = not any(other.first == stage.first for other in self._stages if other is not stage)
        ends = ends_ns[max(0, len(ends_ns) - done - before) :]
        took = [after - earlier for earlier, after in pairwise(ends)]
        each = f": step {done + 1}, {format_ns(round(median(took)))} each" if took else ""
        line = f"[{self._stages.index(stage) + 1}/{len(self._stages)}] {stage.text}{each}"
        self._write(f"\r\x1b[K{line}" if self._shows_steps else f"{line}\n")
        self._is_open = self._shows_steps

    def end(self) -> None:
        """Close the line, before anything else is written."""
        if self._is_open:
            self._write("\n")
            self._is_open = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
