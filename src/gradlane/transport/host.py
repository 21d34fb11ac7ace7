"""Ranks of one host meet, and their nodes sum and send messages through memory that they share (native/host/meeting.h)."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from gradlane._native import MAX_HOST_RANKS, Meeting
from gradlane.errors import AuthError, CapacityError, CommunicationError, JobError, PeerDied
from gradlane.transport.node import Node

_LIMIT, _REFUSED = 1, 3
_KEY = "memory"
_LIMITED, _NAMED = "!", "@"


def can_share(node: Node) -> bool:
    """Whether the workers of `node`'s job are on one host, more than one and not too many: the same on all of them."""
    return node.options.is_local and 2 <= node.options.world <= MAX_HOST_RANKS


def share(store: Any, node: Node, timeout_s: float) -> None:
    """Let `node` sum and send messages through the host's memory from now on; all workers of a job that `can_share` call
    it after `form` and before they start a tensor or send a message.

    Args:
        store: as `form` got it.
        node: of this worker, joined.
        timeout_s: how long to wait for all workers.

    Raises:
        CapacityError: a worker cannot have the memory or the descriptors.
        AuthError: workers belong to several users.
        PeerDied: a worker ended meanwhile.
        CommunicationError: a worker did not come within `timeout_s`.
    """
    options = node.options
    rank, world = options.rank, options.world
    assert rank is not None
    deadline = time.monotonic() + timeout_s

    def left_s() -> float:
        return max(0.001, deadline - time.monotonic())

    if rank == 0:
        meeting = Meeting.lead(world, options.secret)
        kind, _, why = meeting.fault()
        store.set(_KEY, _LIMITED + why if kind else _NAMED + meeting.name())
    else:
        try:
            store.wait([_KEY], timedelta(seconds=left_s()))
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank}: rank 0 shared no memory within {timeout_s:.0f} s ({error}){options.numbering}"
            ) from None
        said = bytes(store.get(_KEY)).decode()
        if said.startswith(_LIMITED):
            raise _as_error(node, _LIMIT, 0, said[1:])
        meeting = Meeting.join(said[1:], rank, world, options.secret)
    if meeting.wait(round(left_s() * 1000)):
        node.native.share(meeting)
        return
    kind, blamed, why = meeting.fault()
    if kind:
        raise _as_error(node, kind, blamed, why)
    raise CommunicationError(
        f"rank {rank}: rank {meeting.missing()} did not come to share this host's memory within {timeout_s:.0f} s"
        f"{options.numbering}"
    )


def _as_error(node: Node, kind: int, blamed: int, why: str) -> JobError:
    text = f"transport: {why}{node.options.numbering}"
    instead = "to sum over loopback instead, set shared_memory=False or GRADLANE_SHARED_MEMORY=0 on all ranks"
    if kind == _LIMIT:
        return CapacityError(f"{text}; raise that limit, or, {instead}")
    if kind == _REFUSED:
        return AuthError(f"{text}; {instead}")
    return PeerDied(text, blamed if node.options.ranks is None else node.options.ranks[blamed])
