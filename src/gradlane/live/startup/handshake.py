"""Handshake: the ranks compare model, options and versions before the first collective.

Each rank writes its terms to the job's store, the one that `init_process_group` used. Rank 0
compares them and writes a verdict, which all ranks read; on a difference all raise the same
`MismatchError`, which names the first difference and both ranks. Collectives of ranks with
different tensors would give wrong sums or crash inside the collective library. Anybody on the
network can read the store, so it holds nothing secret.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from hashlib import sha256
from typing import Any

import msgspec
import torch.distributed as dist

from gradlane.errors import MismatchError

_MAX_BYTES = 4 * 2**20  # the store refuses values of 8 MiB


class Terms(msgspec.Struct, frozen=True):
    """What must be equal on all ranks. Fields are compared in this order."""

    gradlane: str
    torch: str
    world_size: int
    policy: str
    backend: str
    order: str
    optimizers: tuple[str, ...]
    options: dict[str, Any]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # (name, dtype, shape)
    buffers: tuple[tuple[str, str, tuple[int, ...]], ...]

    def fingerprint(self) -> bytes:
        """A digest of 32 bytes; equal terms have equal ones."""
        return sha256(msgspec.json.encode(self, order="deterministic")).digest()


class _Entry(msgspec.Struct, frozen=True):
    rank: int
    where: str
    terms: Terms
    fault: str


def store_of(name: str) -> Any:
    """The job's store, with a prefix for one attachment.

    Args:
        name: of the attachment, the same on all ranks.
    """
    return dist.distributed_c10d.PrefixStore(f"gradlane/{name}", dist.distributed_c10d._get_default_store())


def agree(terms: Terms, group: Any, store: Any, timeout_s: float, fault: str = "") -> None:
    """Compare `terms` over all ranks (collective).

    Args:
        terms: of this rank.
        group: the ranks; None for the default group.
        store: of this attachment.
        timeout_s: seconds to wait for all ranks.
        fault: why this rank cannot continue, which the others cannot know by themselves; "" if it
            can.

    Raises:
        MismatchError: terms differ, a rank has a fault, or a rank did not come in time; on every
            rank.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    entry = msgspec.json.encode(_Entry(rank, whereabouts(), terms, fault))
    if len(entry) > _MAX_BYTES:
        raise MismatchError(f"the description of this model has {len(entry)} bytes, expected at most {_MAX_BYTES}")
    settle(store, rank, world, entry, _judge, "called gradlane.attach", timeout_s)


def settle(
    store: Any, rank: int, world: int, entry: bytes, judge: Callable[[list[bytes]], str], doing: str, timeout_s: float
) -> None:
    """Collect an entry from every rank, have rank 0 judge them, and pass its verdict to all
    (collective).

    Args:
        store: for this call alone.
        entry: of this rank.
        judge: called on rank 0 with all entries, by rank; returns "" for agreement, else the
            verdict.
        doing: what a rank does by handing in an entry, in the past tense, for the error message.
        timeout_s: seconds to wait for all entries.

    Raises:
        MismatchError: with the verdict, or with the ranks that handed in no entry in time.
    """
    store.set(f"entry/{rank}", entry)
    if rank == 0:
        deadline = time.monotonic() + timeout_s
        entries = [_read(store, f"entry/{other}", max(0.01, deadline - time.monotonic())) for other in range(world)]
        missing = [other for other, data in enumerate(entries) if data is None]
        if missing:
            verdict = f"{world - len(missing)} of {world} ranks {doing} within {timeout_s:.0f} s; missing: {missing}"
        else:
            verdict = judge([data for data in entries if data is not None])
        store.set("verdict", verdict)
    verdict_read = _read(store, "verdict", timeout_s + 5)
    if verdict_read is None:
        raise MismatchError(f"rank {rank}: no verdict from rank 0; it never {doing}, or its process is gone")
    if verdict_read:
        raise MismatchError(verdict_read.decode())


def whereabouts() -> str:
    """The "host:pid" of this process, for messages that name a rank."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _judge(entries: list[bytes]) -> str:
    first, *others = [msgspec.json.decode(data, type=_Entry) for data in entries]
    for entry in (first, *others):
        if entry.fault:
            return f"rank {entry.rank} ({entry.where}): {entry.fault}"
    return next((text for other in others if (text := _first_difference(first, other))), "")


def _read(store: Any, key: str, timeout_s: float) -> bytes | None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return None
    value: bytes = store.get(key)
    return value


def _first_difference(one: _Entry, other: _Entry) -> str:
    def differ(what: str, left: object, right: object) -> str:
        return (
            f"ranks disagree on {what}: {left} on rank {one.rank} ({one.where}), {right} on rank {other.rank} "
            f"({other.where}); start every rank with the same script, options and model"
        )

    for field in Terms.__struct_fields__:
        left, right = getattr(one.terms, field), getattr(other.terms, field)
        if left == right:
            continue
        if field not in ("tensors", "buffers"):
            return differ(field, left, right)
        for index, (a, b) in enumerate(zip(left, right, strict=False)):
            if a != b:
                return differ(f"{field[:-1]} {index}", _describe(a), _describe(b))
        return differ(f"the number of {field}", len(left), len(right))
    return ""


def _describe(tensor: tuple[str, str, tuple[int, ...]]) -> str:
    name, dtype, shape = tensor
    return f"{name} of {list(shape)} {dtype}"
