"""RollCall: the ranks of a job, or of a process group, find one another in a store.

A store may be older than these processes. torchrun keeps one over all restarts of a job (PyTorch 2.6 and newer), with
everything that ranks of earlier attempts have written. No number tells one attempt from another: `TORCHELASTIC_RESTART_COUNT`
differs between nodes, and stays the same when a node joins. So no key with a name that an earlier attempt may have used is
believed. Each rank writes a name that it has just drawn. Rank 0 calls it by that name into a place of the store, whose name
rank 0 has just drawn too. Only a process that lives answers.

Whoever reaches the store can read it. So what rank 0 hands to a rank as it calls it is deleted by
that rank, which is there to read it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class RollCall:
    """One rank's part in a meeting.

    Args:
        store: of torch.distributed, with a prefix for these ranks; they may meet in it many times.
        rank, world: of this process among the ranks that meet, and their number.
        way: the address at which this process reaches the store's host; "" if that does not matter.

    Attributes:
        rank, world: as given.
        name: of the meeting, drawn by rank 0; no other has it. Empty on another rank until it is
            called.
        store: of torch.distributed, with a prefix under which only these processes write; None
            on another rank until it is called.
    """

    def __init__(self, store: Any, rank: int, world: int, way: str = "") -> None:
        self.rank, self.world = rank, world
        self._all, self._me = store, secrets.token_hex(8)
        self._called: dict[int, str] = {}
        self.name = ""
        self.store: Any = None
        if rank == 0:
            self._meet_in(self._me)
        else:
            store.set(f"way/{rank}", way)
            store.set(f"here/{rank}", self._me)

    def _meet_in(self, name: str) -> None:
        self.name, self.store = name, dist.distributed_c10d.PrefixStore(name, self._all)

    def call(self, missing: Iterable[int], hand: Callable[[int], str] | None = None) -> None:
        """Call those of the ranks `missing` that are there by now (rank 0 only). Does not wait.

        What a rank has written may be of a process that is dead, so whoever writes another name is
        called again.

        Args:
            missing: ranks.
            hand: gives what a rank that is called now finds by `take`; None for nothing.
        """
        for rank in missing:
            if self._all.check([f"here/{rank}"]):
                who = bytes(self._all.get(f"here/{rank}")).decode()
                if self._called.get(rank) != who:
                    if hand is not None:
                        self.store.set(f"for/{who}", hand(rank))
                    self._all.set(f"call/{who}", self.name)
                    self._called[rank] = who

    def way(self, rank: int) -> str:
        """The address at which `rank`, which is there, reaches the store's host (rank 0 only)."""
        return bytes(self._all.get(f"way/{rank}")).decode()

    def wait_to_be_called(self, timeout_s: float) -> bool:
        """Whether rank 0 has called this rank within `timeout_s` (other ranks only)."""
        if not self.name and are_there(self._all, [f"call/{self._me}"], timeout_s):
            self._meet_in(bytes(self._all.get(f"call/{self._me}")).decode())
        if not self.name:
            self._all.set(f"left/{self.rank}", self._me)  # rank 0 may only be late
        return bool(self.name)

    def left(self, missing: Iterable[int]) -> set[int]:
        """Those of the ranks `missing` that have waited to be called until their time was up (rank 0 only).

        Of this attempt or of an earlier one: this is for texts.
        """
        return {
            rank
            for rank in missing
            if self._all.check([f"left/{rank}"]) and self._all.get(f"left/{rank}") == self._all.get(f"here/{rank}")
        }

    def take(self) -> bytes:
        """What rank 0 handed to this rank, which it has called with something to `hand`. Once only."""
        handed = bytes(self.store.get(f"for/{self._me}"))
        self.store.delete_key(f"for/{self._me}")
        return handed


def are_there(store: Any, keys: list[str], timeout_s: float) -> bool:
    """Whether all `keys` are in a store of torch.distributed within `timeout_s`."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return False
    return True
