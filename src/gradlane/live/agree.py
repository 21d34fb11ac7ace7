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
from datetime import timedelta
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
    order: str
    optimizers: tuple[str, ...]
    options: dict[str, Any]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # (name, dtype, shape)
    buffers: tuple[tuple[str, str, tuple[int, ...]], ...]


class _Entry(msgspec.Struct, frozen=True):
    rank: int
    where: str
    terms: Terms


def agree(terms: Terms, group: Any, name: str, timeout_s: float) -> Any:
    """Compare `terms` over all ranks of `group`. Returns the store, prefixed for this attachment.

    Raises `MismatchError` on every rank, within `timeout_s`, if any differ or a rank never came.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    store: Any = dist.distributed_c10d.PrefixStore(f"gradlane/{name}", dist.distributed_c10d._get_default_store())
    entry = msgspec.json.encode(_Entry(rank, f"{socket.gethostname()}:{os.getpid()}", terms))
    if len(entry) > _MAX_BYTES:
        raise MismatchError(f"the description of this model has {len(entry)} bytes, expected at most {_MAX_BYTES}")
    store.set(f"terms/{rank}", entry)
    if rank == 0:
        store.set("verdict", _judge(store, world, timeout_s))
    verdict = _read(store, "verdict", timeout_s + 5)
    if verdict is None:
        raise MismatchError(f"rank {rank}: no verdict from rank 0 within {timeout_s + 5:.0f} s; is rank 0 attached?")
    if verdict:
        raise MismatchError(verdict.decode())
    return store


def _judge(store: Any, world: int, timeout_s: float) -> bytes:
    """Rank 0: empty if all agree, else what is wrong."""
    entries: list[_Entry] = []
    missing: list[int] = []
    for rank in range(world):
        data = _read(store, f"terms/{rank}", 0.01 if missing else timeout_s)
        if data is None:
            missing.append(rank)
        else:
            entries.append(msgspec.json.decode(data, type=_Entry))
    if missing:
        return f"{len(entries)} of {world} ranks called attach within {timeout_s:.0f} s; missing: {missing}".encode()
    for other in entries[1:]:
        difference = _first_difference(entries[0], other)
        if difference:
            return difference.encode()
    return b""


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
