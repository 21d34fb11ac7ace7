"""Timeline: what happened when, in a simulated or a live run.

Times are integers in nanoseconds on one clock per timeline; only differences mean anything. Spans
are kept in the order of their start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from gradlane.core.fields import MAX_MESSAGES, MAX_NS, MAX_TENSORS, need, need_int

Kind = Literal["forward", "backward", "ready", "send", "receive", "update", "use", "wait", "step", "switch"]
"""What a span is of, with the meaning of its `subject`.

- forward, backward, step: a whole pass or iteration (-1), or one layer's forward pass (layer).
- ready: a gradient became ready (tensor; start = end).
- send: a message was in flight (message), until it arrived. If the message also has a "receive" span, until
  its first phase ended: pushed to the servers, or reduced and scattered.
- receive: the second phase, the pull or the all-gather (message); the sum has arrived at its end.
- update: a tensor's parameter was updated (tensor).
- use: the forward pass first touched a parameter (tensor; start = end).
- wait: the compute thread was blocked (tensor, or -1 for all).
- switch: this plan replaced another (-1; start = end).
"""

_IN_FLIGHT: tuple[Kind, ...] = ("send", "receive")  # a message, in either phase


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One interval of one iteration.

    Attributes:
        kind: see `Kind`.
        iteration: counts from 0.
        subject: a tensor, message or layer, by `kind`; -1 for none.
        start_ns, end_ns: on the timeline's clock.
    """

    kind: Kind
    iteration: int
    subject: int
    start_ns: int
    end_ns: int

    def __post_init__(self) -> None:
        need_int("iteration", self.iteration, 0, 2**40)
        need_int("subject", self.subject, -1, max(MAX_MESSAGES, MAX_TENSORS))
        need_int("start_ns", self.start_ns, 0, MAX_NS)
        if not self.start_ns <= self.end_ns <= MAX_NS:  # a timeline has many: no text for each
            need(False, "end_ns", self.end_ns, f"the start {self.start_ns} or later")


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of one rank under one plan.

    Attributes:
        plan: the plan's fingerprint.
        rank: the rank.
        spans: in order of start.
    """

    plan: str
    rank: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        need_int("rank", self.rank, 0, 2**31)

    def of(self, kind: Kind) -> list[Span]:
        """The spans of one kind, in order of start."""
        return [span for span in self.spans if span.kind == kind]

    def during(self, iterations: Iterable[int]) -> Timeline:
        """The same timeline with the spans of some iterations only."""
        kept = set(iterations)
        return msgspec.structs.replace(self, spans=tuple(span for span in self.spans if span.iteration in kept))

    def iteration_ns(self) -> list[int]:
        """Length in ns of each iteration that has a "step" span."""
        return [span.end_ns - span.start_ns for span in self.of("step")]

    def hidden(self) -> float:
        """The fraction of communication that was overlapped with computation, 0 to 1.

        Communication is the time in which a message was in flight, in either of its phases. The overlapped part is that in
        which the compute thread did not wait. A timeline without messages has 1.
        """
        messages = [(span.start_ns, span.end_ns) for kind in _IN_FLIGHT for span in self.of(kind)]
        return hidden_part(messages, [(span.start_ns, span.end_ns) for span in self.of("wait")])


def hidden_part(messages: Iterable[tuple[int, int]], waits: Iterable[tuple[int, int]]) -> float:
    """The part of communication that was overlapped with computation (see `Timeline.hidden`).

    Args:
        messages, waits: start and end of each message or phase of one, and of each wait of the compute thread, in ns.
    """
    sent, waited = union(messages), union(waits)
    total = sum(end - start for start, end in sent)
    return 1.0 if total == 0 else 1.0 - _overlap(sent, waited) / total


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times as `intervals`, of start and end, as intervals in order that do not touch."""
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
