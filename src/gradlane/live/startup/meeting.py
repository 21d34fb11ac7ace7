"""Meeting: the ranks of a job, or of a process group, find one another in a store and agree.

A store may be older than these processes. torchrun keeps one over all restarts of a job (PyTorch
2.6 and newer), with everything that ranks of earlier attempts have written, and no number tells an
attempt from those before: `TORCHELASTIC_RESTART_COUNT` differs between nodes, and stays the same
when a node joins. So no key with a name that an earlier attempt may have used is believed. Each
rank writes a name that it has just drawn, and rank 0 calls it by that name into a place of the
store whose name rank 0 has just drawn. Only a process that lives answers.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from gradlane.errors import MismatchError

_LOOK_S = (0.005, 0.1)  # between two looks for ranks that have not answered: at first, and at most
_GRACE_S = 5.0  # in which rank 0's verdict comes after its timeout


class Meeting(NamedTuple):
    """What ranks that have met share.

    Args:
        name: drawn by rank 0; no other meeting has it.
        store: of torch.distributed, with a prefix under which only these processes write.
    """

    name: str
    store: Any


def meet(
    store: Any,
    rank: int,
    world: int,
    entry: bytes,
    judge: Callable[[list[bytes]], str],
    doing: str,
    timeout_s: float,
    ranks: list[int] | None = None,
) -> Meeting:
    """Collect an entry from every rank, have rank 0 judge them, and pass its verdict to all
    (collective).

    Args:
        store: of torch.distributed, with a prefix for these ranks; they may meet in it many times.
        rank, world: of this process among the ranks that meet, and their number.
        entry: of this rank.
        judge: called on rank 0 with all entries, by rank; returns "" for agreement, else the
            verdict.
        doing: what a rank does by coming, in the past tense, for the error message.
        timeout_s: seconds to wait for all ranks.
        ranks: numbers of these ranks in the whole job, for the error message; None if they are all.

    Returns:
        The meeting, with `store` under a prefix of its own.

    Raises:
        MismatchError: with the verdict, or with the ranks that did not come in time.
    """
    named = ranks or list(range(world))
    deadline = time.monotonic() + timeout_s + (0 if rank == 0 else _GRACE_S)
    if rank == 0:
        name = secrets.token_hex(8)
        here: Any = dist.distributed_c10d.PrefixStore(name, store)
        missing = _call(store, here, name, world, deadline)
        if missing:
            names = [named[each] for each in missing]
            verdict = f"{world - len(missing)} of {world} ranks {doing} within {timeout_s:.0f} s; missing: {names}"
        else:
            verdict = judge([entry, *(bytes(here.get(f"entry/{other}")) for other in range(1, world))])
        here.set("verdict", verdict)
    else:
        me = secrets.token_hex(8)
        store.set(f"here/{rank}", me)
        found = _read(store, f"call/{me}", deadline)
        name = "" if found is None else found.decode()
        here = dist.distributed_c10d.PrefixStore(name, store)
        if found is not None:
            here.set(f"entry/{rank}", entry)
            found = _read(here, "verdict", deadline)
        if found is None:
            raise MismatchError(
                f"rank {named[rank]}: no verdict from rank {named[0]}; it never {doing}, or its process is gone"
            )
        verdict = found.decode()
    if verdict:
        raise MismatchError(verdict)
    return Meeting(name, here)


def _call(store: Any, here: Any, name: str, world: int, deadline: float) -> list[int]:
    """Call every rank to the meeting `name` until it has an entry `here`; returns those that have
    none by `deadline`.
    """
    missing, called, look_s = list(range(1, world)), dict[int, str](), _LOOK_S[0]
    while missing and (left_s := deadline - time.monotonic()) > 0:
        for rank in missing:
            who = bytes(store.get(f"here/{rank}")).decode() if store.check([f"here/{rank}"]) else ""
            if who and called.get(rank) != who:
                store.set(f"call/{who}", name)
                called[rank] = who
        # a wait of the store that ends by its timeout is two lines in torch's log
        time.sleep(min(look_s, left_s))
        missing = [rank for rank in missing if not here.check([f"entry/{rank}"])]
        look_s = min(2 * look_s, _LOOK_S[1])
    return missing


def whereabouts() -> str:
    """The "host:pid" of this process, for messages that name a rank."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _read(store: Any, key: str, deadline: float) -> bytes | None:
    """The value of `key`, or None if it is not there by `deadline`."""
    try:
        store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
    except dist.DistStoreError:
        return None
    return bytes(store.get(key))
