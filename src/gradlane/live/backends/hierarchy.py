"""Hierarchical sums over torch.distributed: each message is summed within the hosts, then between
them, and spread within the hosts.

With H hosts of G ranks, each rank owns a G-th of a message on its host. It exchanges that part alone
with the ranks that own the same part on the other hosts. So a host sends 2 (H - 1) / H of a message's
bytes, where a ring through all ranks sends 2 (H G - 1) / (H G) of them.

A message goes in pieces, so that one piece is between hosts while the next is summed on its host.
All ranks must issue the collectives of a process group in one order, but pieces leave a stage in
another order on each rank. So each stage has its own process group, and takes pieces in the order of
the first stage.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradlane.live.backends.process_groups import OnEnd, ProcessGroups, UnderWay, all_reduce, unrecorded
from gradlane.live.backends.two_phase import TwoPhase
from gradlane.transport import formation

PIECE_BYTES = 1 << 20
ENTER, BETWEEN, LEAVE = 0, 1, 2
_STAGES = 3


class Hosts(NamedTuple):
    """Where the ranks of a group are, as one of them sees it: equally many on each of several hosts.

    Attributes:
        mine: the ranks on this rank's host.
        peers: the ranks at this rank's place on each host.
    """

    mine: tuple[int, ...]
    peers: tuple[int, ...]


def hosts_of(group: Any) -> list[int]:
    """For each rank of `group` the number of its host, from 0 (collective).

    Args:
        group: of Gloo, on the CPU.
    """
    name = bytearray(hashlib.sha256(formation.host_name().encode()).digest())
    mine = torch.frombuffer(name, dtype=torch.uint8)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, mine, group)
    names = [bytes(each.tolist()) for each in told]
    numbers = {each: number for number, each in enumerate(dict.fromkeys(names))}
    return [numbers[each] for each in names]


def levels_of(hosts: Sequence[int], rank: int) -> Hosts | None:
    """What `rank` has to do with the others; None unless there are several hosts, with equally many
    ranks on each, and at least two.

    Args:
        hosts: for each rank the number of its host.
        rank: of this process.
    """
    ranks, *others = Counter(hosts).values()
    if ranks < 2 or not others or set(others) != {ranks}:
        return None
    ranks_of: dict[int, list[int]] = {}
    for each, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(each)
    mine = ranks_of[hosts[rank]]
    return Hosts(tuple(mine), tuple(each[mine.index(rank)] for each in ranks_of.values()))


class Step(NamedTuple):
    """A piece in one stage.

    Attributes:
        stage: ENTER, BETWEEN or LEAVE.
        begin: begins a collective in the stage's process group; returns the works to wait for.
        finish: called when they have ended.
    """

    stage: int
    begin: Callable[[Any], list[Any]]
    finish: Callable[[], None]


class HierarchicalSum:
    """The memory of one message, as the steps of its pieces.

    Args:
        tensor: summed in place, on the CPU.
        hosts: see `Hosts`.
        two_phase: whether the sum between hosts has two phases as well (policy `dear`).
    """

    def __init__(self, tensor: torch.Tensor, hosts: Hosts, two_phase: bool = False) -> None:
        self.is_two_phase = two_phase
        self.pieces = torch.split(tensor, max(1, PIECE_BYTES // tensor.element_size()))
        sums = [TwoPhase(piece, len(hosts.mine), PIECE_BYTES) for piece in self.pieces]
        self.enter = [Step(ENTER, each.scatter, each.add) for each in sums]
        self.between = [Step(BETWEEN, partial(_all_reduce, each.share), nothing) for each in sums]
        self.leave = [Step(LEAVE, each.gather, each.copy_out) for each in sums]
        self.first_phase: list[tuple[Step, ...]] = list(zip(self.enter, self.between, self.leave, strict=True))
        """The steps of each piece; of a two-phase message, a reduce-scatter over all ranks."""
        self.second_phase: list[tuple[Step, ...]] = []
        """The steps of each piece of a two-phase message: an all-gather over all ranks."""
        if two_phase:
            outer = [TwoPhase(each.share, len(hosts.peers)) for each in sums]
            scatter = [Step(BETWEEN, each.scatter, each.add) for each in outer]
            gather = [Step(BETWEEN, each.gather, each.copy_out) for each in outer]
            self.first_phase = list(zip(self.enter, scatter, strict=True))
            self.second_phase = list(zip(gather, self.leave, strict=True))


class Stages:
    """The three stages of a lane, each with a process group of its own (made collectively).

    Threads: `start` is called by one thread at a time; what a step has left is done on threads of
    torch.distributed.

    Args:
        groups: opens them, and keeps them.
        hosts: of this rank.
    """

    def __init__(self, groups: ProcessGroups, hosts: Hosts) -> None:
        self._groups, self._first, self.hosts = groups, len(groups), hosts
        for members in (hosts.mine, hosts.peers, hosts.mine):
            groups.open(members)
        self._lock = threading.Lock()
        self._waiting: list[deque[_Piece]] = [deque() for _ in range(_STAGES)]

    @property
    def group_between(self) -> int:
        """The number of the process group between hosts among the groups."""
        return self._first + BETWEEN

    def start(self, pieces: Sequence[Sequence[Step]], ended: OnEnd) -> None:
        """Send pieces through their stages, in this order on all ranks.

        Args:
            pieces: the steps of each, in the order of the stages.
            ended: called once, on any thread: with None when all have passed, or with the first
                error.
        """
        message = _Message(len(pieces), ended)
        with self._lock:
            for steps in pieces:
                piece = _Piece(message, steps)
                for step in steps:
                    self._waiting[step.stage].append(piece)
            begun = self._advance()
        self._tell(begun)

    def _advance(self) -> list[tuple[_Piece, UnderWay | Exception]]:
        """Under the lock: begin each next step that may begin, in the order of its stage."""
        begun: list[tuple[_Piece, UnderWay | Exception]] = []
        for stage, waiting in enumerate(self._waiting):
            while waiting and waiting[0].is_before(stage):
                piece = waiting.popleft()
                piece.is_busy = True
                try:
                    works = unrecorded(piece.step.begin, self._groups[self._first + stage])
                except Exception as error:  # a connection that broke before
                    begun.append((piece, error))
                else:
                    begun.append((piece, UnderWay(self._groups, works, partial(self._ended, piece))))
        return begun

    def _tell(self, begun: Sequence[tuple[_Piece, UnderWay | Exception]]) -> None:
        for piece, work in begun:
            if isinstance(work, Exception):
                piece.message.fail(work)
            else:
                work.tell()

    def _ended(self, piece: _Piece, error: BaseException | None) -> None:
        try:
            if error is None:
                piece.step.finish()
        except Exception as raised:  # torch.distributed would drop it
            error = raised
        if error is not None:
            piece.message.fail(error)
            return
        with self._lock:
            piece.at, piece.is_busy = piece.at + 1, False
            has_passed = piece.at == len(piece.steps)
            if has_passed:
                piece.message.left -= 1
            is_last = has_passed and not piece.message.left
            begun = self._advance()
        self._tell(begun)
        if is_last:
            piece.message.end()


class _Message:
    """The end of a message: `ended` is called once."""

    def __init__(self, pieces: int, ended: OnEnd) -> None:
        self.left, self._ended = pieces, ended
        self._has_failed = threading.Lock()

    def fail(self, error: BaseException) -> None:
        if self._has_failed.acquire(blocking=False):
            self._ended(error)

    def end(self) -> None:
        self._ended(None)


class _Piece:
    def __init__(self, message: _Message, steps: Sequence[Step]) -> None:
        self.message, self.steps = message, steps
        self.at, self.is_busy = 0, False

    @property
    def step(self) -> Step:
        return self.steps[self.at]

    def is_before(self, stage: int) -> bool:
        """Whether the next that it has to do is its step in `stage`."""
        return not self.is_busy and self.at < len(self.steps) and self.step.stage == stage


def _all_reduce(share: torch.Tensor, group: Any) -> list[Any]:
    return [all_reduce(group, [share], dist.AllreduceOptions())]


def nothing() -> None:
    """Nothing is left to do."""
