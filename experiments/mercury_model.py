"""Mercury's equations for WFBP as they stand (§V, Eq. 3, 4, 6 and 7), and with pulls that share a link.

By Eq. 7 a pull takes size / bandwidth from when its push has ended, whatever other pulls are on the way. Where a large
tensor is followed by small ones, several pulls then take more than the link has.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gradlane import zoo
from gradlane.core.profile import Profile
from gradlane.sim.passes import forward_ends

CLASSES = 101  # of Caltech101
BATCHES = {"vgg16-cifar10": 128, "vgg16": 32, "vgg19": 32, "alexnet": 512, "resnet50": 32, "bert-base": 32}


def profile_of(name: str, device: str = "gtx-1080ti") -> Profile:
    """A model of the paper's Table II, with the 101 classes of Caltech101 where the zoo's has 1000."""
    profile = zoo.profile(name, device=device, batch=BATCHES[name])
    return on_caltech101(profile) if name != "vgg16-cifar10" else profile


def on_caltech101(profile: Profile) -> Profile:
    """The same with a last layer of 101 classes where the zoo's has 1000."""
    tensors = list(profile.tensors)
    last = tensors[0].layer
    for index, seen in enumerate(tensors):
        if seen.layer == last and seen.spec.size_bytes % 4000 == 0:
            size_bytes = seen.spec.size_bytes // 1000 * CLASSES
            tensors[index] = msgspec.structs.replace(seen, spec=msgspec.structs.replace(seen.spec, size_bytes=size_bytes))
    return msgspec.structs.replace(profile, tensors=tuple(tensors))


def wfbp_ns(profile: Profile, bytes_per_second: int, *, pulls_share: bool, crosses_barrier: bool) -> int:
    """Iteration time of WFBP, of whole tensors first come, first served.

    Args:
        profile: one iteration's computation.
        bytes_per_second: B.
        pulls_share: whether a pull waits for the one before it. If not: Eq. 7 as it stands.
        crosses_barrier: whether a layer waits for its own pull alone, as in Eq. 4.
    """
    arrivals = [end_ns for _, end_ns in _pulls(profile, bytes_per_second, pulls_share)]
    return forward_ends(profile, arrivals, crosses_barrier)


def most_pulls_at_once(profile: Profile, bytes_per_second: int) -> int:
    """How many pulls of Eq. 7 are on the way at once, each with the whole bandwidth."""
    pulls = _pulls(profile, bytes_per_second, pulls_share=False)
    return max(sum(begun <= start < end for begun, end in pulls) for start, _ in pulls)


def least_rate(efficiency: Callable[[int], float], target: float) -> int:
    """The least bytes per second, within 1 %, from which on `efficiency` is at least `target` at all rates tried."""
    enough = 0
    for step in range(1100, -1, -1):
        rate = round(10**6 * 1.01**step)
        if efficiency(rate) < target:
            break
        enough = rate
    return enough


def _pulls(profile: Profile, bytes_per_second: int, pulls_share: bool) -> list[tuple[int, int]]:
    """(start, end) of each tensor's pull, in ns after the start of the backward pass."""
    pushed = pulled = 0
    found = []
    for seen in profile.tensors:
        length = seen.spec.size_bytes * 10**9 // bytes_per_second
        pushed = max(seen.ready_ns, pushed) + length
        start = max(pushed, pulled) if pulls_share else pushed
        pulled = start + length
        found.append((start, pulled))
    return found
