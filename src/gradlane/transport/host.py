"""Ranks of one host meet (native/host/meeting.h), and their nodes sum and send messages through memory that they share
(node/node_shared.cc, node/mailboxes.h).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gradlane._native import MAX_HOST_RANKS, Meeting
from gradlane.errors import AuthError, CapacityError, CommunicationError, JobError, PeerDied
from gradlane.transport.node import Node, NodeOptions

_LIMIT, _REFUSED, _LATE = 1, 3, 9  # the first two as in native/host/meeting.h
_KEY = "memory"
_LIMITED, _NAMED = "!", "@"


def can_share(options: NodeOptions) -> bool:
    """Whether the ranks of each host can share its memory; the same on all of them.

    So they can where every host has equally many, from 2 to 32. Over several hosts, sums of what hosts have summed are
    not in rank order, so that `rank_order` excludes it there.

    Args:
        options: of a node that `form` has made.
    """
    counts = Counter(options.hosts)
    (ranks, *others) = set(counts.values())
    return not others and 2 <= ranks <= MAX_HOST_RANKS and (len(counts) == 1 or not options.rank_order)


def share(store: Any, node: Node, timeout_s: float) -> None:
    """Let `node` sum through its host's memory from now on, and send messages through it where all workers are on one
    host; all workers of a job that `can_share` call it after `form` and before they start a tensor or send a message.

    Args:
        store: as `form` got it.
        node: of this worker, joined.
        timeout_s: how long to wait for all workers.

    Raises:
        CapacityError: a worker cannot have the memory or the descriptors.
        AuthError: workers of a host belong to several users.
        PeerDied: a worker ended meanwhile.
        CommunicationError: a worker did not come within `timeout_s`.
    """
    options = node.options
    assert options.rank is not None
    host = options.hosts[options.rank]
    ranks = [rank for rank, its in enumerate(options.hosts) if its == host]
    place, key = ranks.index(options.rank), f"{_KEY}/{host}"
    deadline = time.monotonic() + timeout_s

    def left_s() -> float:
        return max(0.001, deadline - time.monotonic())

    if place == 0:
        meeting = Meeting.lead(ranks, options.secret)
        kind, _, why = meeting.fault()
        store.set(key, _LIMITED + why if kind else _NAMED + meeting.name())
    else:
        said = _read(store, node, key, left_s, f"rank {ranks[0]} shared no memory within {timeout_s:.0f} s")
        if said.startswith(_LIMITED):
            raise _as_error(node, _LIMIT, ranks[0], said[1:])
        meeting = Meeting.join(said[1:], place, ranks, options.secret)
    have_met = meeting.wait(round(left_s() * 1000))
    kind, blamed, why = meeting.fault()
    if not have_met and not kind:
        kind, blamed = _LATE, ranks[0]
        why = f"rank {meeting.missing()} did not come to share the memory of its host within {timeout_s:.0f} s"
    if place == 0:
        store.set(f"{key}/met", f"{kind} {blamed} {why}")
    if kind:
        raise _as_error(node, kind, blamed, why)
    for each in sorted(set(options.hosts) - {host}):
        late = f"the ranks of rank {options.hosts.index(each)}'s host did not share its memory within {timeout_s:.0f} s"
        kind_of, blamed_of, why = _read(store, node, f"{_KEY}/{each}/met", left_s, late).split(" ", 2)
        if int(kind_of):
            raise _as_error(node, int(kind_of), int(blamed_of), why)
    node.native.share(meeting, options.hosts)


def _read(store: Any, node: Node, key: str, left_s: Callable[[], float], late: str) -> str:
    """What another rank has put into the store; raises `CommunicationError`, which says `late`, or the node's failure."""
    while True:
        turn_s = min(1.0, left_s())
        try:
            store.wait([key], timedelta(seconds=turn_s))
            return bytes(store.get(key)).decode()
        except RuntimeError as error:
            node.check()  # whoever was to put it there may have ended
            if turn_s < 1.0:
                raise CommunicationError(f"rank {node.options.rank}: {late} ({error}){node.options.numbering}") from None


def _as_error(node: Node, kind: int, blamed: int, why: str) -> JobError:
    text = f"transport: {why}{node.options.numbering}"
    instead = "to sum over loopback instead, set shared_memory=False or GRADLANE_SHARED_MEMORY=0 on all ranks"
    if kind == _LIMIT:
        return CapacityError(f"{text}; raise that limit, or, {instead}")
    if kind == _REFUSED:
        return AuthError(f"{text}; {instead}")
    if kind == _LATE:
        return CommunicationError(text)
    return PeerDied(text, blamed if node.options.ranks is None else node.options.ranks[blamed])
