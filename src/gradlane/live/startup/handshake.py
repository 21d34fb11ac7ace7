"""Handshake: the ranks compare model, options and versions before the first collective.

Each rank writes its terms to the job's store, the one that `init_process_group` used. Rank 0
compares them and writes a verdict, which all ranks read (`agreement`); on a difference all raise the
same `MismatchError`, which names the first difference and both ranks. Collectives of ranks with
different tensors would give wrong sums or crash inside the collective library. Anybody on the
network can read the store, so it holds nothing secret.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
import torch

import gradlane
from gradlane.errors import MismatchError
from gradlane.live.comm.roll_call import RollCall
from gradlane.live.session.job import Job
from gradlane.live.startup.agreement import settle, whereabouts

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
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # (name, dtype, shape)
    buffers: tuple[tuple[str, str, tuple[int, ...]], ...]
    options: dict[str, Any]  # may have the fingerprint of a plan, which says less than what is above

    def fingerprint(self) -> bytes:
        """A digest of 32 bytes; equal terms have equal ones."""
        return sha256(msgspec.json.encode(self, order="deterministic")).digest()


def terms_of(job: Job, policy: str, backend: str, order: str, options: dict[str, Any]) -> Terms:
    """The terms of a session that trains `job`.

    Args:
        job: the model and its optimizers.
        policy, backend, order: names.
        options: what else must be equal on all ranks.
    """
    return Terms(
        gradlane=gradlane.__version__,
        torch=str(torch.__version__),
        world_size=job.world,
        policy=policy,
        backend=backend,
        order=order,
        optimizers=tuple(type(one).__name__ for one in job.optimizers),
        options=options,
        tensors=job.described_tensors,
        buffers=job.described_buffers,
    )


class _Entry(msgspec.Struct, frozen=True):
    rank: int
    where: str
    terms: Terms
    fault: str


def agree(terms: Terms, job: Job, roll: RollCall, fault: str = "") -> None:
    """Compare `terms` over all ranks of `job` (collective).

    Args:
        terms: of this rank.
        job: whose ranks have met.
        roll: of their meeting.
        fault: why this rank cannot continue, which the others cannot know by themselves; "" if it
            can.

    Raises:
        MismatchError: terms differ, a rank has a fault, or a rank did not come in time; on every
            rank.
    """
    entry = msgspec.json.encode(_Entry(job.global_rank, whereabouts(), terms, fault))
    if len(entry) > _MAX_BYTES:
        raise MismatchError(f"the description of this model has {len(entry)} bytes, expected at most {_MAX_BYTES}")
    settle(roll, entry, _judge, "called gradlane.attach", job.timeout_s, job.ranks)


def _judge(entries: list[bytes]) -> str:
    first, *others = [msgspec.json.decode(data, type=_Entry) for data in entries]
    for entry in (first, *others):
        if entry.fault:
            return f"rank {entry.rank} ({entry.where}): {entry.fault}"
    return next((text for other in others if (text := _first_difference(first, other))), "")


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
        if field == "options":
            keys = [key for key in left | right if left.get(key) != right.get(key)]
            return differ(field, *({key: options.get(key) for key in keys} for options in (left, right)))
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
