"""Whether messages travel while gradients are still computed."""

from __future__ import annotations

from collections import defaultdict

from gradlane.core.timeline import Timeline


def most_sent_early(timeline: Timeline) -> int:
    """The most messages of an iteration that began before its last gradient was ready.

    On a crowded machine some iterations have none: a framework's threads hand over all gradients at once.
    """
    last: dict[int, int] = defaultdict(int)
    for span in timeline.of("ready"):
        last[span.iteration] = max(last[span.iteration], span.start_ns)
    early: dict[int, int] = defaultdict(int)
    for span in timeline.of("send"):
        early[span.iteration] += span.start_ns < last[span.iteration]
    return max(early.values())
