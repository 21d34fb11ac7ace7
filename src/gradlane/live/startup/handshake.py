"""Agreement before step 1: every rank proves that it would do the same as every other.

Each rank writes what must be equal into the job's own store (the one that torch.distributed met through);
rank 0 compares and writes a verdict; all ranks read it, and all raise the same `MismatchError`, which names
the first difference and both sides. No collective is issued before that: two ranks with different tensors
would get wrong sums or a crash inside the collective library. The store's content is public to the
network, so nothing secret is put there.
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
    """What must be equal on all ranks, in the order in which differences are looked for."""

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
        """32 bytes, equal where the terms are."""
        return sha256(msgspec.json.encode(self, order="deterministic")).digest()


class _Entry(msgspec.Struct, frozen=True):
    rank: int
    where: str
    terms: Terms
    fault: str


def agree(terms: Terms, group: Any, name: str, timeout_s: float, fault: str = "") -> Any:
    """Compare `terms` over all ranks of `group`. Returns the store, prefixed for this attachment.

    fault: why this rank cannot go on, where the others could not know it. Raises `MismatchError` on every rank, within
    `timeout_s`, if any differ, a rank has a fault or never came.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    store: Any = dist.distributed_c10d.PrefixStore(f"gradlane/{name}", dist.distributed_c10d._get_default_store())
    entry = msgspec.json.encode(_Entry(rank, whereabouts(), terms, fault))
    if len(entry) > _MAX_BYTES:
        raise MismatchError(f"the description of this model has {len(entry)} bytes, expected at most {_MAX_BYTES}")
    settle(store, rank, world, entry, _judge, "called gradlane.attach", timeout_s)
    return store


def settle(
    store: Any, rank: int, world: int, entry: bytes, judge: Callable[[list[bytes]], str], doing: str, timeout_s: float
) -> None:
    """Every rank hands in `entry`; rank 0 judges them all ("" is agreement); every rank learns the verdict.

    Raises `MismatchError` with the verdict, or naming the ranks that handed nothing in within `timeout_s`
    (`doing` says what they failed to do).
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
    told = _read(store, "verdict", timeout_s + 5)
    if told is None:
        raise MismatchError(f"rank {rank}: no verdict from rank 0; it never {doing}, or its process is gone")
    if told:
        raise MismatchError(told.decode())


def whereabouts() -> str:
    """Host and process, for messages that name a rank."""
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
