"""ScheduleProblem: messages one after another, their iteration time, and small changes to them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from gradlane.core.network import Network
from gradlane.core.plan import Plan, Slice
from gradlane.core.profile import DTYPE_BYTES, Profile


class Group(NamedTuple):
    """One message.

    Attributes:
        ready_ns: when its last slice is ready.
        size_bytes: bytes of all slices.
        later_ns: the least time that the forward pass takes after its arrival.
        dtype: the slices' dtype.
        pieces: the slices.
    """

    ready_ns: int
    size_bytes: int
    later_ns: int
    dtype: str
    pieces: tuple[Slice, ...]


class ScheduleProblem:
    """What all schedules of one profile on one network share."""

    def __init__(self, profile: Profile, network: Network) -> None:
        self.network = network
        self.floor_ns = profile.compute_ns
        self._ready = [tensor.ready_ns for tensor in profile.tensors]
        self._dtypes = [tensor.spec.dtype for tensor in profile.tensors]
        from_layer = [0] * (len(profile.layers) + 1)
        for index in range(len(profile.layers) - 1, -1, -1):
            from_layer[index] = from_layer[index + 1] + profile.layers[index].forward_ns + profile.layers[index].update_ns
        self.later = [from_layer[tensor.layer] for tensor in profile.tensors]

    def group(self, pieces: Iterable[Slice]) -> Group:
        """One message of `pieces`, slices of one dtype."""
        pieces = tuple(pieces)
        return Group(
            max(self._ready[piece.tensor] for piece in pieces),
            sum(piece.size_bytes for piece in pieces),
            max(self.later[piece.tensor] for piece in pieces),
            self._dtypes[pieces[0].tensor],
            pieces,
        )

    def schedule_of(self, plan: Plan) -> Schedule:
        """The messages of a plan in its sequence, one at a time."""
        assert plan.sequence is not None
        return Schedule(self, [self.group(plan.messages[index].slices) for index in plan.sequence])


class Schedule:
    """Groups in the order in which they are sent, each when ready and the one before has ended.

    Frozen.

    Attributes:
        groups: the messages.
        value: the iteration time in ns: the maximum of each group's end + `later_ns`, and of
            computation alone.
        critical: index of the group that determines `value`.
    """

    def __init__(self, problem: ScheduleProblem, groups: list[Group], before: Schedule | None = None, same: int = 0) -> None:
        # the first `same` groups are those of `before`, whose ends need no new computation
        self.groups, self._problem = groups, problem
        self._ends: list[int] = before._ends[:same] if before else []
        end = self._ends[-1] if self._ends else 0
        cost_ns = problem.network.cost_ns
        for group in groups[same:]:
            ready = group[0]
            end = (ready if ready > end else end) + cost_ns(group[1])
            self._ends.append(end)
        totals = [end + group[2] for end, group in zip(self._ends, groups, strict=True)]
        worst = max(totals)
        self.critical = totals.index(worst)
        self.value = max(worst, problem.floor_ns)

    def changed(self, draw: random.Random) -> Schedule | None:
        """This schedule with one random change, mostly near the group that determines its value.

        Returns:
            The changed schedule, or None if the change that was drawn is not possible.
        """
        groups = self.groups
        # only messages sent without a pause before the critical group can make it end earlier
        first = self.critical
        while first > 0 and self._ends[first - 1] >= groups[first].ready_ns:
            first -= 1
        place = draw.randint(first, self.critical) if draw.random() < 0.7 else draw.randrange(len(groups))
        what = draw.random()
        if what < 0.2:
            return self._merge(place, place + 1)
        if what < 0.45:
            return self._split(place, draw) if len(groups[place].pieces) > 1 else self._cut(place, draw)
        near = draw.random() < 0.5
        to = place + draw.choice((-2, -1, 1, 2)) if near else draw.randint(first, len(groups) - 1)
        if what < 0.75:
            return self._move(place, to)
        return self._merge(place, to) if len(groups[place].pieces) == 1 else self._hand(place, to, draw)

    def _fits(self, place: int, to: int) -> bool:
        return 0 <= to < len(self.groups) and to != place and self.groups[place].dtype == self.groups[to].dtype

    def _merge(self, place: int, to: int) -> Schedule | None:
        """Merge two messages, at the second one's place."""
        if not self._fits(place, to):
            return None
        groups = list(self.groups)
        groups[to] = self._problem.group(groups[to].pieces + groups[place].pieces)
        del groups[place]
        return Schedule(self._problem, groups, self, min(place, to))

    def _split(self, place: int, draw: random.Random) -> Schedule:
        """Split a message's slices in two: by first use or, at random, by readiness."""
        by_use, later = draw.random() < 0.5, self._problem.later
        pieces = sorted(self.groups[place].pieces, key=lambda p: (-later[p.tensor] if by_use else 0, p.tensor, p.offset_bytes))
        cut = draw.randint(1, len(pieces) - 1)
        parts = [self._problem.group(pieces[:cut]), self._problem.group(pieces[cut:])]
        return Schedule(self._problem, self.groups[:place] + parts + self.groups[place + 1 :], self, place)

    def _cut(self, place: int, draw: random.Random) -> Schedule | None:
        """Cut a message of one slice in two; the second part follows at once or a little later."""
        piece = self.groups[place].pieces[0]
        element = DTYPE_BYTES[self.groups[place].dtype]
        size_bytes = int(piece.size_bytes * draw.choice((0.125, 0.25, 0.5, 0.75))) // element * element
        if size_bytes == 0:
            return None
        first = Slice(piece.tensor, piece.offset_bytes, size_bytes)
        second = Slice(piece.tensor, piece.offset_bytes + size_bytes, piece.size_bytes - size_bytes)
        groups = list(self.groups)
        groups[place] = self._problem.group([first])
        groups.insert(draw.randint(place + 1, min(len(groups), place + 4)), self._problem.group([second]))
        return Schedule(self._problem, groups, self, place)

    def _move(self, place: int, to: int) -> Schedule | None:
        """Send a message earlier or later."""
        if not 0 <= to < len(self.groups) or to == place:
            return None
        groups = list(self.groups)
        groups.insert(to, groups.pop(place))
        return Schedule(self._problem, groups, self, min(place, to))

    def _hand(self, place: int, to: int, draw: random.Random) -> Schedule | None:
        """Move a slice from one message to another."""
        if not self._fits(place, to):
            return None
        pieces = list(self.groups[place].pieces)
        piece = pieces.pop(draw.randrange(len(pieces)))
        groups = list(self.groups)
        groups[place] = self._problem.group(pieces)
        groups[to] = self._problem.group((*groups[to].pieces, piece))
        return Schedule(self._problem, groups, self, min(place, to))
