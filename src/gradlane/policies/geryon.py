"""Geryon: two flows of different priority in the network; urgent parameters go in the first."""

from __future__ import annotations

import random
from typing import ClassVar, Literal

import msgspec

from gradlane.core.fields import MAX_BYTES, need, need_int
from gradlane.core.network import Network
from gradlane.core.plan import MAX_LANES, Lane, Message, Plan, Slice
from gradlane.core.policy import SIZES, KnobRange, check_cuts, cut
from gradlane.core.profile import DTYPE_BYTES, Profile

_CLASSES = 8
_TRIED = (10, 30, 50, 70, 90)  # thresholds in percent
_WHOLE_BELOW = 4096  # elements; shards of a bias would be a few bytes each


class Geryon(msgspec.Struct, frozen=True):
    """Slices in lanes of different network priority, first in, first out within a lane (§III).

    Switches serve the lane of urgent layers first, so that end hosts need no order.

    Wins where the network itself serves one class before the other. On a network that does not, its
    lanes are first in, first out.

    Differs from the paper: "coarse" goes by what the paper says of convolutions, as a profile does not know kinds of layers. In
    the paper the first iterations try some thresholds and fit a curve. Here the threshold is given, searched over iterations
    (`gradlane.planning.tuning`), or with `threshold="auto"` the best of five in the simulator. There may be more than two
    lanes.

    Attributes:
        threshold_percent: with "threshold" (§III-C), layer l of L is urgent if 1 - l/L is above
            this, with l from 1 in forward order. 0: all layers but the last; 100: none.
        threshold: "auto" takes the one of `threshold_percent`, 10, 30, 50, 70 and 90 % that is fastest in the simulator.
        slice_bytes: the largest slice, unless `slice_elements` is set.
        slice_elements: the largest slice in elements, as §V-D counts it; 0: `slice_bytes`.
        shards: a tensor of 4096 elements or more is first cut into this many equal parts, one for
            each server (§IV), and each part into slices; 1 to 1000.
        categories: "threshold", or "coarse" (§III-B): a layer is urgent if its share of the forward time is larger
            than its share of the bytes. Convolutions are, and fully connected layers are not.
        lanes: 2 to 8. The first is for urgent layers; the others share the rest in forward order,
            with about equal bytes each.
        pulls: "at once": a sum comes back as soon as it is there; "after pushes": when a worker has pushed all its
            gradients (Eq. 1 to 3), as in TensorFlow.
        pull_seed: with "after pushes", 0 for sums in the order of first use; otherwise the seed of a random order, which
            is TensorFlow's (§II-B).
    """

    name: ClassVar[str] = "geryon"
    paper: ClassVar[str] = "Geryon (INFOCOM '20) §III"
    differs: ClassVar[str] = (
        "coarse categories by bytes and time, not by kinds of layers; the threshold is given, or found in the simulator; "
        "more than two lanes; sums come back at once, in the paper when all gradients have been pushed (knob pulls)"
    )

    tunable: ClassVar[dict[str, KnobRange]] = {"threshold_percent": KnobRange(0, 100, 5), "slice_bytes": SIZES}

    threshold_percent: int = 50
    slice_bytes: int = 2**20
    slice_elements: int = 0
    shards: int = 1
    categories: Literal["threshold", "coarse"] = "threshold"
    lanes: int = 2
    pulls: Literal["at once", "after pushes"] = "at once"
    pull_seed: int = 0
    threshold: Literal["fixed", "auto"] = "fixed"

    def __post_init__(self) -> None:
        need_int("threshold_percent", self.threshold_percent, 0, 100)
        need(self.threshold in ("fixed", "auto"), "threshold", self.threshold, "'fixed' or 'auto'")
        if self.threshold == "auto":
            need(self.categories == "threshold", "categories", self.categories, "'threshold', with threshold 'auto'")
        need_int("slice_bytes", self.slice_bytes, 8, MAX_BYTES)
        need_int("slice_elements", self.slice_elements, 0, MAX_BYTES // 8)
        need_int("shards", self.shards, 1, 1000)
        need(self.categories in ("threshold", "coarse"), "categories", self.categories, "'threshold' or 'coarse'")
        need_int("lanes", self.lanes, 2, min(MAX_LANES, _CLASSES))
        need(self.pulls in ("at once", "after pushes"), "pulls", self.pulls, "'at once' or 'after pushes'")
        need_int("pull_seed", self.pull_seed, 0, 2**31 if self.pulls == "after pushes" else 0)

    def trials(self) -> tuple[Geryon, ...]:
        """With `threshold="auto"` the policies to choose from, `threshold_percent` before others that are as fast."""
        if self.threshold == "fixed":
            return ()
        percents = dict.fromkeys((self.threshold_percent, *_TRIED))
        return tuple(msgspec.structs.replace(self, threshold="fixed", threshold_percent=percent) for percent in percents)

    def plan(self, profile: Profile, network: Network) -> Plan:
        lane_of = self._lanes_of_layers(profile)
        messages = tuple(
            Message((piece,), lane=lane_of[profile.tensors[piece.tensor].layer]) for piece in self._pieces(profile)
        )
        if self.pulls == "after pushes":
            messages = self._pulled(messages, profile)
        lanes = tuple(Lane(network_priority=each) for each in range(self.lanes))
        return Plan(self.name, profile.model, profile.specs, messages, lanes, crosses_barrier=True)

    def _pieces(self, profile: Profile) -> list[Slice]:
        """All tensors in slices: within each shard, of at most the size that a knob says."""
        if self.slice_elements:
            smallest = self.slice_elements * min(DTYPE_BYTES[seen.spec.dtype] for seen in profile.tensors)
            check_cuts(profile, smallest, "slice_elements")
        else:
            check_cuts(profile, self.slice_bytes, "slice_bytes")
        pieces: list[Slice] = []
        for tensor, seen in enumerate(profile.tensors):
            element = DTYPE_BYTES[seen.spec.dtype]
            slice_bytes = self.slice_elements * element or self.slice_bytes
            step = slice_bytes - slice_bytes % element
            elements = seen.spec.size_bytes // element
            shards = self.shards if elements >= _WHOLE_BELOW else 1
            for shard in cut(profile, tensor, -(-elements // shards) * element):
                end = shard.offset_bytes + shard.size_bytes
                pieces += [Slice(tensor, at, min(step, end - at)) for at in range(shard.offset_bytes, end, step)]
        return pieces

    def _pulled(self, messages: tuple[Message, ...], profile: Profile) -> tuple[Message, ...]:
        """The same in two phases, which are pushed in the order in which gradients become ready."""
        urgency = profile.urgency()
        order = sorted(range(len(messages)), key=lambda index: (urgency[messages[index].slices[0].tensor], index))
        if self.pull_seed:
            random.Random(self.pull_seed).shuffle(order)
        place_of = {index: place for place, index in enumerate(order)}
        return tuple(
            msgspec.structs.replace(message, two_phase=True, priority=place_of[index]) for index, message in enumerate(messages)
        )

    def _lanes_of_layers(self, profile: Profile) -> list[int]:
        size_of = [0] * len(profile.layers)
        for seen in profile.tensors:
            size_of[seen.layer] += seen.spec.size_bytes
        if self.categories == "coarse":
            # shares of bytes and of time, compared without dividing
            urgent = [
                size_of[index] * profile.forward_ns < layer.forward_ns * profile.size_bytes
                for index, layer in enumerate(profile.layers)
            ]
        else:
            count = len(profile.layers)
            urgent = [100 * (count - index - 1) > self.threshold_percent * count for index in range(count)]
        rest_bytes = sum(size for size, first in zip(size_of, urgent, strict=True) if not first)
        lanes, before = [], 0
        for size, first in zip(size_of, urgent, strict=True):
            lanes.append(0 if first else 1 + min(self.lanes - 2, before * (self.lanes - 1) // max(1, rest_bytes)))
            before += 0 if first else size
        return lanes
