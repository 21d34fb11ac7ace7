"""Training loops as people write them. Each runs on real ranks under DDP and under gradlane; `compare` says what differs.

A loop gets a `Job` and must not know which of the two it runs under. What it puts into `job.seen` is compared as well.
"""

from tests.live.loops import (  # noqa: F401  (they fill LOOPS)
    buffers,
    bystanders,
    conversions,
    exported,
    gradients,
    kept_gradients,
    optimizer_hooks,
    parameters,
    parts,
    passes,
    rates,
    readers,
    refused,
    state,
    unused,
    written_gradients,
)
from tests.live.loops.groups import train_alike, train_in_a_group_of_all_ranks, unfinished_backward
from tests.live.loops.job import (
    GIVEN,
    LOOPS,
    POLICIES,
    Job,
    Mlp,
    adam,
    bits,
    compare,
    compare_with_late_announcements,
    log_lines,
    momentum,
    under_ddp,
)

__all__ = [
    "GIVEN",
    "LOOPS",
    "POLICIES",
    "Job",
    "Mlp",
    "adam",
    "bits",
    "compare",
    "compare_with_late_announcements",
    "log_lines",
    "momentum",
    "train_alike",
    "train_in_a_group_of_all_ranks",
    "under_ddp",
    "unfinished_backward",
]
