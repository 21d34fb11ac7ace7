"""Pattern: when in a backward pass gradients become ready, and profiles brought up to date with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gradlane.core.profile import Profile, TensorSpec


def ready_parts(ready_ns: Mapping[int, int], backward: tuple[int, int], tensors: Sequence[TensorSpec]) -> dict[str, float]:
    """When gradients were ready, as fractions of the backward pass.

    Args:
        ready_ns: by index into `tensors`, when its gradient was ready.
        backward: start and end of the backward pass, in ns on the same clock.
        tensors: the model's tensors.

    Returns:
        Fractions by tensor name, for the tensors that were seen.
    """
    start_ns, end_ns = backward
    if end_ns <= start_ns:
        return {}
    return {
        tensors[tensor].name: min(1.0, max(0.0, (at_ns - start_ns) / (end_ns - start_ns))) for tensor, at_ns in ready_ns.items()
    }


def shift_of(profile: Profile, ready: Mapping[str, float]) -> float:
    """How far readiness has shifted: the mean over bytes, as a fraction of the backward pass.

    Args:
        profile: the profile to compare with.
        ready: by tensor name, when it was ready as a fraction of the backward pass; tensors that
            are missing count as unchanged.
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
    """The same profile with gradients ready when `ready` says, in fractions of the backward pass.

    Layers are reordered opposite to their last gradients, since backward is forward reversed; a
    layer without gradients keeps its place before the layer that followed it.
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
