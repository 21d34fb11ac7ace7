"""Rendezvous: `init_process_group` that first checks what torch.distributed only notices by a
timeout.

A rank out of range, two processes with the same rank, ranks that disagree on the world size and a
rank that never comes are typed errors here. They are raised within about a second if all
processes are there, else at the timeout. `gradlane launch` replaces
`torch.distributed.init_process_group` by this one; a script may also call it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from gradlane.errors import CommunicationError, InputError, MismatchError
from gradlane.live.comm.roll_call import RollCall
from gradlane.live.startup.agreement import settle, whereabouts

_init_process_group = dist.init_process_group


class _Hello(msgspec.Struct, frozen=True):
    rank: int
    world_size: int
    where: str


def init_process_group(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
    """As torch.distributed's, once all ranks are known to be there and to agree.

    Only the `env://` method is checked; any other call goes straight to torch.distributed.

    Args:
        backend, init_method, options: torch.distributed's. `timeout` also limits the wait for ranks.

    Raises:
        InputError: an environment variable is missing or has a wrong value.
        MismatchError: ranks disagree, or a rank is missing or there twice.
        CommunicationError: rank 0's store cannot be reached.
    """
    if init_method not in (None, "env://") or "store" in options or "rank" in options:
        _init_process_group(backend, init_method, **options)
        return
    rank, world, store = _enter(os.environ, options.get("timeout") or dist.distributed_c10d.default_pg_timeout)
    _init_process_group(backend, store=store, rank=rank, world_size=world, **options)


def _enter(environment: Mapping[str, str], timeout: timedelta) -> tuple[int, int, Any]:
    world = _integer(environment, "WORLD_SIZE", 1, 10**6)
    rank = _integer(environment, "RANK", 0, world - 1)
    port = _integer(environment, "MASTER_PORT", 1, 65535)
    address = environment.get("MASTER_ADDR", "")
    if not address:
        raise InputError(
            "MASTER_ADDR: not set, expected the address of rank 0; start the script with torchrun or gradlane launch"
        )
    # torchrun gives every process a rank of its own and the same world size, and keeps its store
    # over restarts; without it the store is rank 0's and as old as that process
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        tcp = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            None,
            is_master=rank == 0 and not has_agent,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).partition("\n")[0]
        raise CommunicationError(f"rank {rank} cannot reach or open the store at {address}:{port}: {reason}") from None
    store: Any = dist.distributed_c10d.PrefixStore("gradlane/meeting", tcp)
    hello = _Hello(rank, world, whereabouts())
    if not has_agent:
        _refuse_wrong_variables(store, hello, timeout)
    roll = RollCall(store, rank, world)
    settle(roll, msgspec.json.encode(hello), _judge, "came to the meeting", timeout.total_seconds())
    return rank, world, dist.distributed_c10d.PrefixStore("default", roll.store)


def _refuse_wrong_variables(store: Any, hello: _Hello, timeout: timedelta) -> None:
    """Raise `MismatchError` if another process has this rank, or rank 0 another world size."""
    if store.add(f"count/{hello.rank}", 1) > 1:
        first = store.get(f"first/{hello.rank}").decode()
        if first != hello.where:  # this process may come again
            raise MismatchError(
                f"RANK={hello.rank} is taken by {first}; this is {hello.where}; give every process a rank of its own"
            )
    store.set(f"first/{hello.rank}", hello.where)
    if hello.rank == 0:
        store.set("world", str(hello.world_size))
        return
    # rank 0 waits for no rank beyond its own world size: such a rank has to notice the difference
    # itself, and rank 0 hears of it from any other
    store.wait(["world"], timeout)
    theirs = int(store.get("world"))
    if hello.rank >= theirs:
        raise MismatchError(_disagree(theirs, hello.rank, hello.world_size))


def _judge(entries: list[bytes]) -> str:
    first, *others = [msgspec.json.decode(data, type=_Hello) for data in entries]
    wrong = (other for other in others if other.world_size != first.world_size)
    return next((_disagree(first.world_size, other.rank, other.world_size) for other in wrong), "")


def _disagree(world: int, other_rank: int, other_world: int) -> str:
    return f"ranks disagree on the world size: {world} on rank 0, {other_world} on rank {other_rank} (WORLD_SIZE)"


def _integer(environment: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environment.get(name)
    if text is None:
        raise InputError(f"{name}: not set; start the script with torchrun or gradlane launch")
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InputError(f"{name}: got {text!r}, expected an integer from {low} to {high}")
    return value
