"""The zoo beside what others recorded: which tensors there are, and how the backward pass is spread over them.

The bounds are what was found, rounded up: they say how far counted operations are from a clock, not how far they may
be. Shallow convolutions take longer than counted.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from gradlane import trace, zoo
from gradlane.core.profile import Profile

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the recordings of others are not beside this checkout")


def ready(profile: Profile) -> tuple[list[int], list[float]]:
    """Of each layer with parameters, from last to first: its bytes, and the share of backward done when it is ready."""
    layers = [list(tensors) for _, tensors in groupby(profile.tensors, key=lambda tensor: tensor.layer)]
    sizes = [sum(tensor.spec.size_bytes for tensor in layer) for layer in layers]
    return sizes, [layer[-1].ready_ns / profile.backward_ns for layer in layers]


def largest_gap(ours: list[float], recorded: list[float]) -> float:
    return max(abs(mine - theirs) for mine, theirs in zip(ours, recorded, strict=True))


@pytest.mark.parametrize(
    ("name", "file", "batch", "bound"),
    [
        ("vgg16", "vgg16", 128, 0.14),
        ("alexnet", "alexnet", 256, 0.18),
        ("resnet18", "resnet18", 256, 0.04),
        ("resnet50", "resnet50", 128, 0.03),
        ("inception-v3", "inception_v3", 128, 0.04),
    ],
)
def test_modules_and_their_readiness_beside_pipedreams_recordings(name, file, batch, bound):
    # the GPU is not named; the batch follows from the sizes of the last activations
    recorded = trace.read(DATA / "pipedream-profiles" / f"image_classification_{file}_graph.txt")
    our_sizes, our_shares = ready(zoo.profile(name, device="v100", batch=batch))
    sizes, shares = ready(recorded)
    assert our_sizes == sizes
    assert largest_gap(our_shares, shares) < bound
    # nearest to a V100's: a zoo's profile of one is off by no more than a fifth
    assert zoo.profile(name, device="v100", batch=batch).compute_ns == pytest.approx(recorded.compute_ns, rel=0.2)


def test_googlenet_beside_the_recording_of_mg_wfbps_authors():
    recorded = trace.read(DATA / "b-caffe-googlenet-k80" / "tmp4comm.log")
    our_sizes, our_shares = ready(zoo.profile("googlenet", device="k80", batch=64))
    sizes, shares = ready(recorded)
    # theirs are padded: the difference is less than 128 bytes a tensor, two tensors a layer
    assert all(0 <= theirs - mine < 256 for mine, theirs in zip(our_sizes, sizes, strict=True))
    assert largest_gap(our_shares, shares) < 0.21


@pytest.mark.slow
def test_resnet50_beside_a_trace_of_a_v100_that_no_total_was_taken_from():
    recorded = trace.read(DATA / "traces" / "resnet50-v100-kineto.json.gz")
    ours = zoo.profile("resnet50", device="v100", batch=32)
    assert [tensor.spec.size_bytes for tensor in ours.tensors] == [tensor.spec.size_bytes for tensor in recorded.tensors]
    shares = [[tensor.ready_ns / profile.backward_ns for tensor in profile.tensors] for profile in (ours, recorded)]
    assert largest_gap(*shares) < 0.02
    took = [profile.forward_ns + profile.backward_ns for profile in (ours, recorded)]
    assert took[0] == pytest.approx(took[1], rel=0.1)
    updates = [sum(layer.update_ns for layer in profile.layers) for profile in (ours, recorded)]
    assert updates[0] == pytest.approx(updates[1], rel=0.02)
