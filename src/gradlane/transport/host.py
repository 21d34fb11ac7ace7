"""Ranks of one host meet (native/host/meeting.h), and their nodes sum and send messages through memory that they share
(node/node_shared.cc, node/mailboxes.h).
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gradlane._native import MAX_HOST_RANKS, Meeting
from gradlane.errors import AuthError, CapacityError, CommunicationError, InputError, JobError, PeerDied
from gradlane.transport.node import Node, NodeOptions

PIECE_BYTES = 1 << 20
"""Where several hosts sum first and then exchange their sums, larger tensors go in pieces of this: while one crosses the
network, the next is summed."""

log = logging.getLogger("gradlane")

_LIMIT, _REFUSED, _LATE = 1, 3, 9  # the first two as in native/host/meeting.h
_KEY = "memory"
_LIMITED, _NAMED = "!", "@"


def is_wanted() -> bool:
    """Whether ranks of one host are to share its memory: unless GRADLANE_SHARED_MEMORY=0 in the environment says no.

    Raises:
        InputError: it is neither 0 nor 1.
    """
    given = os.environ.get("GRADLANE_SHARED_MEMORY", "1")
    if given not in ("0", "1"):
        raise InputError(f"GRADLANE_SHARED_MEMORY: got {given!r}, expected 0 or 1")
    return given == "1"


def why_not(options: NodeOptions) -> str:
    """Why the ranks of each host cannot share its memory, or "" if they can; the same on all of them.

    They can where every host has equally many, from 2 to 32. Over several hosts, sums of what hosts have summed are
    not in rank order, so that `rank_order` excludes it there.

    Args:
        options: of a node that `form` has made.
    """
    counts = Counter(options.hosts)
    numbers = sorted(set(counts.values()))
    if len(numbers) > 1:
        return f"hosts have {', '.join(map(str, numbers))} ranks, and not all equally many"
    if not 2 <= numbers[0] <= MAX_HOST_RANKS:
        return f"each host has {numbers[0]} of the ranks, and expected are 2 to {MAX_HOST_RANKS}"
    if len(counts) > 1 and options.rank_order:
        return "sums are in rank order over several hosts"
    return ""


def share_if_possible(store: Any, node: Node, timeout_s: float, wanted: bool = True) -> bool:
    """`share` where the ranks of each host can and are wanted to; else worker 0 logs why not. Closes `node` if it raises.

    Args:
        store, node, timeout_s: as for `share`.
        wanted: the same on all workers.

    Returns:
        Whether they share memory.
    """
    reason = why_not(node.options) if wanted else "shared memory is turned off"
    if reason:
        if node.options.rank == 0:
            log.info("gradlane: nothing is summed in the memory of a host: %s", reason)
        return False
    try:
        share(store, node, timeout_s)
    except BaseException:
        node.close()
        raise
    return True


def share(store: Any, node: Node, timeout_s: float) -> None:
    """Let `node` sum through its host's memory from now on, and send messages through it where all workers are on one
    host. All workers of a job where nothing speaks against it (`why_not`) call it after `form` and before they define or
    start a tensor or send a message.

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
