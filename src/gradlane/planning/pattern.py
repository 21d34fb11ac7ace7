"""Pattern: when in a backward pass gradients become ready, and a profile made to agree with how it is now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gradlane.core.profile import Profile, TensorSpec


def ready_parts(ready_ns: Mapping[int, int], backward: tuple[int, int], tensors: Sequence[TensorSpec]) -> dict[str, float]:
    """By name when those of `tensors` that were seen were ready, as a part of the backward pass (start, end)."""
    start_ns, end_ns = backward
    if end_ns <= start_ns:
        return {}
    return {
        tensors[tensor].name: min(1.0, max(0.0, (at_ns - start_ns) / (end_ns - start_ns))) for tensor, at_ns in ready_ns.items()
    }


def shift_of(profile: Profile, ready: Mapping[str, float]) -> float:
    """By which part of the backward pass a byte of gradients is ready at another time than in `profile`, on average.

    ready: by tensor, as a part of the backward pass; those that are missing are where they were.
    """
    if not profile.backward_ns:
        return 0.0
    moved = sum(
        abs(ready[seen.spec.name] - seen.ready_ns / profile.backward_ns) * seen.spec.size_bytes
        for seen in profile.tensors
        if seen.spec.name in ready
    )
    return moved / profile.size_bytes


def with_pattern(profile: Profile, ready: Mapping[str, float]) -> Profile:
    """The same where gradients are ready when `ready` says, as parts of the backward pass.

    Layers run in the order opposite to that of their last gradients, since backward is forward reversed; one without a
    gradient stays before the layer that it was before.
    """
    by_layer: dict[int, int] = {}
    tensors = []
    for seen in profile.tensors:
        part = ready.get(seen.spec.name)
        moved = seen if part is None else msgspec.structs.replace(seen, ready_ns=round(part * profile.backward_ns))
        tensors.append(moved)
        by_layer[seen.layer] = max(by_layer.get(seen.layer, 0), moved.ready_ns)
    following = 0
    for layer in reversed(range(len(profile.layers))):
        following = by_layer.setdefault(layer, following)
    order = sorted(range(len(profile.layers)), key=lambda layer: (-by_layer[layer], layer))
    place = {layer: index for index, layer in enumerate(order)}
    tensors = [msgspec.structs.replace(each, layer=place[each.layer]) for each in tensors]
    tensors.sort(key=lambda each: each.ready_ns)
    return msgspec.structs.replace(profile, tensors=tuple(tensors), layers=tuple(profile.layers[layer] for layer in order))
