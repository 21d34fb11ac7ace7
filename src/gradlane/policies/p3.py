"""P3: priority-based parameter propagation."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Plan
from gradlane.core.policy import SIZES, UNTIL, KnobRange, sliced_by_urgency
from gradlane.core.profile import Profile


class P3(msgspec.Struct, frozen=True):
    """Small slices by priority of first use, one at a time (ByteScheduler §2.3 on P3).

    Slices of 160 KB let an urgent tensor overtake a large one; each waits until the one before has left. The
    papers disagree on what P3 waits for: an acknowledgement (ByteScheduler §4.2), or the return of TCP's blocking
    call (Geryon §VI, Prophet §6.1). That call returns when the rest of a slice fits the socket's buffer, so the
    next slice is prepared while the buffer empties (`buffer_bytes`). With `until="acknowledged"` it waits for the servers.

    Wins where a startup is short and a large tensor blocks urgent ones: over servers, on a slow
    network. Over all-reduce each slice pays a startup, which many workers make long; it is last
    there.

    Differs from the paper: over all-reduce as well as over a parameter server.

    Attributes:
        slice_bytes: the largest slice.
        buffer_bytes: of the socket. 0: one slice at a time. Otherwise a slice also starts while what has not left
            fits this buffer, as after a blocking call.
        until: as the knob of `bytescheduler`.
    """

    name: ClassVar[str] = "p3"
    paper: ClassVar[str] = "P3 (MLSys '19), as ByteScheduler (SOSP '19) §2.3, §4.2 describes it"
    differs: ClassVar[str] = (
        "over all-reduce too; waits for bytes to leave, or for acknowledgements (knob until); a blocking call is a window of a "
        "slice and the socket's buffer (knob buffer_bytes)"
    )

    tunable: ClassVar[dict[str, KnobRange]] = {"slice_bytes": SIZES}

    slice_bytes: int = 160_000
    buffer_bytes: int = 0
    until: str = "sent"

    def __post_init__(self) -> None:
        need_int("slice_bytes", self.slice_bytes, 8, MAX_BYTES)
        need_int("buffer_bytes", self.buffer_bytes, 0, MAX_BYTES - self.slice_bytes)
        need(self.until in UNTIL, "until", self.until, " or ".join(map(repr, UNTIL)))

    def plan(self, profile: Profile, network: Network) -> Plan:
        messages = sliced_by_urgency(profile, self.slice_bytes, "slice_bytes")
        lanes = (Lane(window_bytes=self.slice_bytes + self.buffer_bytes, acknowledged=UNTIL[self.until]),)
        return Plan(self.name, profile.model, profile.specs, messages, lanes, crosses_barrier=True)
