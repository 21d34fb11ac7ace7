"""Timeline: what happened when, in a simulated or in a live run, in one type.

Times are integers in nanoseconds on one clock per timeline; only differences mean anything. Spans are kept
in the order of their start.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gradlane.core.fields import MAX_MESSAGES, MAX_NS, need, need_int

Kind = Literal["forward", "backward", "ready", "send", "receive", "update", "use", "wait", "step", "switch"]
"""forward, backward, step: a whole pass or iteration (subject -1), or a layer's forward (subject: layer).
ready: a gradient became ready (subject: tensor; start = end). send: a message is under way (subject:
message): until it has arrived, or where it also has a receive span, until its first half is done (pushed to the
servers, or reduced and scattered). receive: the second half, the pull or the all-gather (subject: message);
before its end nothing has arrived. update: a tensor's parameter was updated (subject: tensor). use: the forward
pass first touched a tensor (subject: tensor; start = end). wait: the compute thread was blocked for a tensor
(subject: tensor). switch: the plan was put in force, in place of another (subject -1; start = end)."""


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One interval of one iteration. `iteration` counts from 0; `subject` depends on the kind."""

    kind: Kind
    iteration: int
    subject: int
    start_ns: int
    end_ns: int

    def __post_init__(self) -> None:
        need_int("iteration", self.iteration, 0, 2**40)
        need_int("subject", self.subject, -1, MAX_MESSAGES)
        need_int("start_ns", self.start_ns, 0, MAX_NS)
        need(self.start_ns <= self.end_ns <= MAX_NS, "end_ns", self.end_ns, f"the start {self.start_ns} or later")


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of one rank under one plan. `plan` is the plan's fingerprint."""

    plan: str
    rank: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        need_int("rank", self.rank, 0, 2**31)

    def of(self, kind: Kind) -> list[Span]:
        """The spans of one kind, in order of start."""
        return [span for span in self.spans if span.kind == kind]

    def iteration_ns(self) -> list[int]:
        """Length of each iteration that has a "step" span."""
        return [span.end_ns - span.start_ns for span in self.of("step")]

    def hidden(self) -> float:
        """The part of all sending time (union over messages) in which the compute thread was not waiting.

        1.0 when no wait span overlaps a send span; 0.0 when every sending instant was waited for.
        """
        sends = _union([(span.start_ns, span.end_ns) for span in self.of("send")])
        waits = _union([(span.start_ns, span.end_ns) for span in self.of("wait")])
        total = sum(end - start for start, end in sends)
        return 1.0 if total == 0 else 1.0 - _overlap(sends, waits) / total


def _union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _overlap(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    total, i, j = 0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
