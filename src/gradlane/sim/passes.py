"""The forward pass after communication: when each layer may run, and when the pass ends."""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.core.profile import Profile


def tensors_by_layer(profile: Profile) -> list[list[int]]:
    """For each layer the tensors whose first use it is."""
    tensors: list[list[int]] = [[] for _ in profile.layers]
    for index, tensor in enumerate(profile.tensors):
        tensors[tensor.layer].append(index)
    return tensors


def forward_ends(profile: Profile, arrivals: Sequence[int], crosses_barrier: bool) -> int:
    """When the next forward pass ends, in ns after the start of backward: the time of a steady iteration.

    arrivals: for each tensor when it arrived, in ns after the start of backward. Across the barrier this is
    Mercury Eq. 4 (an update, then its layer, each after the layer before and the arrival of its tensors);
    behind it all updates and layers follow the last arrival.
    """
    now = profile.backward_ns
    if not crosses_barrier:
        return max(now, max(arrivals)) + profile.compute_ns - profile.backward_ns
    latest = [0] * len(profile.layers)
    for tensor, arrived in zip(profile.tensors, arrivals, strict=True):
        if arrived > latest[tensor.layer]:
            latest[tensor.layer] = arrived
    for layer, arrived in zip(profile.layers, latest, strict=True):
        now = (arrived if arrived > now else now) + layer.update_ns + layer.forward_ns
    return now
