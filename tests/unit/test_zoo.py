from __future__ import annotations

import json
import math
import re
from collections import Counter

import msgspec
import pytest

from gradlane import zoo
from gradlane.core import files
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.zoo.described import Description, Step, descriptions
from gradlane.zoo.devices import DEVICES, LAUNCH_NS, TOTALS, forward_seconds, update_seconds
from gradlane.zoo.layers import WINOGRAD, Net
from tests.commands import invoke

# tensors and parameters of the reference definitions: torchvision, timm, transformers, Caffe
REFERENCE = {
    "alexnet": (16, 61_100_840),
    "vgg16": (32, 138_357_544),
    "vgg16-cifar10": (32, 33_638_218),
    "vgg19": (38, 143_667_240),
    "resnet18": (62, 11_689_512),
    "resnet50": (161, 25_557_032),
    "resnet152": (467, 60_192_808),
    "googlenet": (128, 13_378_280),
    "inception-v3": (292, 27_161_264),
    "inception-v4": (449, 42_679_816),
    "densenet161": (484, 28_681_000),
    "densenet201": (604, 20_013_928),
    "mobilenet": (83, 4_231_976),
    "yolo": (52, 271_703_550),
    "yolov2": (68, 50_962_889),
    "bert-base": (199, 109_482_240),
    "transformer-base": (253, 63_082_496),
    "gpt2": (148, 124_439_808),
    "vit-b16": (152, 86_567_656),
    "llama-1b": (146, 1_235_814_400),
    "bert-large": (391, 335_141_888),
    "vit-l16": (296, 304_326_632),
    "llama-3-8b": (291, 8_030_261_248),
    "olmoe-1b-7b": (3_219, 6_919_161_856),
    "sdxl-unet": (1_680, 2_567_463_684),
    "whisper-large-v3": (1_258, 1_543_490_560 - 1_500 * 1_280),  # the encoder's positions are not trained
}


def test_a_described_model_s_reference_says_how_many_parameters_it_has():
    for name, each in descriptions().items():
        stated = [int(number.replace(",", "")) for number in re.findall(r"\d{1,3}(?:,\d{3})+", each.reference)]
        assert zoo.describe(name).parameters == stated[0] - sum(stated[1:])  # the others are not trained


def test_a_position_of_a_mixture_passes_its_share_of_the_experts():
    # 1.3 G of the 6.9 G parameters are active for a token (Muennighoff et al. 2024, Table 1); a product takes two
    # operations, and attention over 1,024 positions on the average adds 4 * 1,024 * 2,048 a layer
    active = 2_048 * (2 * 1.28e9 - 2 * 50_304 * 2_048 + 16 * 4 * 1_024 * 2_048)
    assert zoo.describe("olmoe-1b-7b").operations == pytest.approx(active, rel=0.05)


def test_a_model_is_described_by_data():
    step = {"op": "linear", "name": "layer.{0}.expert.{1}", "args": {"out": 3, "bias": False}}
    inner = {"op": "repeat", "times": 2, "steps": [step, {"op": "shape", "args": {"shape": [3]}}]}
    outer = {"op": "repeat", "times": 2, "steps": [inner]}
    model = {"title": "t", "reference": "r", "batch": 1, "device": "h100", "input": [3], "steps": [outer]}
    net = msgspec.convert(model, Description).build()
    names = [f"layer.{layer}.expert.{expert}.weight" for layer in (0, 1) for expert in (0, 1)]
    assert [module.tensors for module in net.modules] == [[(name, (3, 3))] for name in names]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"op": "lineal"}, "op: got 'lineal', expected shape, repeat or one of conv"),
        ({"op": "linear"}, "name: got ''"),
        ({"op": "relu", "name": "act"}, "name: got 'act'"),
        ({"op": "repeat"}, "steps: got 0, expected steps for repeat"),
        ({"op": "relu", "colour": 1}, "unknown field `colour`"),
    ],
)
def test_a_step_that_means_nothing_is_refused(step, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(step, Step)


def test_every_model_has_a_reference():
    assert set(zoo.names()) == set(REFERENCE)


@pytest.mark.parametrize("name", zoo.names())
def test_tensors_and_parameters_are_those_of_the_reference_definition(name):
    entry, profile = zoo.describe(name), zoo.profile(name)
    assert (entry.tensors, entry.parameters) == REFERENCE[name]
    assert (len(profile.tensors), profile.size_bytes // 4) == REFERENCE[name]


@pytest.mark.parametrize(
    ("name", "giga_macs"),
    [("resnet50", 3.9), ("resnet152", 11.61), ("densenet161", 7.85), ("densenet201", 4.39), ("inception-v4", 6.16)],
)
def test_operations_are_near_those_that_mg_wfbp_table_4_states(name, giga_macs):
    # ours have normalisation, activations and pooling too, and the stride of ResNet-50 in its 3 x 3 convolutions
    assert zoo.describe(name).operations / 2e9 == pytest.approx(giga_macs, rel=0.07)


def test_sizes_are_distributed_as_mg_wfbp_figure_5_says():
    of_resnet = Counter(tensor.spec.size_bytes for tensor in zoo.profile("resnet152").tensors)
    assert of_resnet[1024] == 152  # the paper says 150
    of_densenet = Counter(tensor.spec.size_bytes for tensor in zoo.profile("densenet161").tensors)
    assert of_densenet[768] == 160


@pytest.mark.parametrize(
    ("name", "head", "share"), [("yolo", "fc", 77.86), ("vgg19", "classifier", 86.06), ("resnet50", "fc", 8.02)]
)
def test_the_share_of_fully_connected_layers_is_that_of_geryon_figure_6(name, head, share):
    tensors = zoo.profile(name).tensors
    connected = sum(t.spec.size_bytes for t in tensors if t.spec.name.startswith(head) and t.spec.name[len(head)] in ".01")
    assert 100 * connected / sum(t.spec.size_bytes for t in tensors) == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize(("name", "device"), TOTALS)
def test_a_measured_total_is_met(name, device):
    total = TOTALS[name, device]
    profile = zoo.profile(name, device=device, batch=total.batch)
    assert profile.forward_ns + profile.backward_ns == pytest.approx(total.seconds * 1e9, rel=1e-6)
    assert f"calibrated to {total.source}" in profile.source


def test_a_description_says_what_the_default_profile_is():
    entry = zoo.describe("vgg16")
    assert (entry.batch, entry.device, entry.paper) == (32, "gtx-1080ti", "Mercury")
    assert entry.source == zoo.profile("vgg16").source
    assert zoo.describe("gpt2").paper is None


def test_what_was_not_measured_says_so():
    assert "not measured: k40's mean factor" in zoo.profile("alexnet").source
    assert "not measured: the mean factor of all devices" in zoo.profile("gpt2").source


def test_a_device_of_the_same_chip_is_as_fast_as_its_data_sheet_says():
    for name in zoo.names():
        slower, faster = (zoo.profile(name, device=device, batch=8) for device in ("v100", "v100-sxm"))
        assert 0.89 < faster.compute_ns / slower.compute_ns < 1
    assert "not measured: v100's factor of 1.39" in zoo.profile("resnet152", device="v100-sxm").source
    assert "not measured: v100's mean factor" in zoo.profile("gpt2", device="v100-sxm").source
    assert {spec.same_chip for spec in DEVICES.values()} - {None} <= {device for _, device in TOTALS}


def test_a_rate_above_the_peak_is_explained():
    assert "105% of 14 FP32 TFLOP/s as counted; Winograd's algorithm" in invoke("plan", "vgg16", "--device", "v100")
    assert "Winograd" not in invoke("plan", "resnet50", "--device", "v100", "--policy", "ddp")


def test_wide_3_by_3_convolutions_take_the_time_of_fewer_operations_than_are_counted():
    by_kernel = []
    for kernel in (3, 5):
        net = Net(256, 28, 28)
        net.conv("conv", 256, kernel, pad=kernel // 2)
        (module,) = net.modules
        by_kernel.append((module.operations, forward_seconds(module, 32, DEVICES["v100"]) - LAUNCH_NS / 1e9))
    (small, small_s), (large, large_s) = by_kernel
    assert small * 25 == large * 9
    assert large_s / small_s == pytest.approx(25 / 9 * WINOGRAD, rel=1e-6)


def test_an_update_costs_a_launch_for_each_tensor_and_its_bytes():
    net = Net(1)
    net.linear("linear", 1)
    assert update_seconds(net.modules[0], DEVICES["v100"]) == pytest.approx(2 * LAUNCH_NS / 1e9, rel=1e-3)


def test_a_larger_batch_takes_more_time_and_less_for_each_sample():
    small, large = zoo.profile("resnet50", batch=8), zoo.profile("resnet50", batch=64)
    assert small.compute_ns < large.compute_ns < 8 * small.compute_ns
    assert small.specs == large.specs


def test_gradients_are_ready_from_the_last_layer_to_the_first():
    profile = zoo.profile("vgg16")
    assert [t.spec.name for t in profile.tensors][:2] == ["classifier.6.bias", "classifier.6.weight"]
    assert profile.tensors[-1].spec.name == "features.0.weight"
    assert profile.tensors[-1].ready_ns == profile.backward_ns
    assert [profile.layers[t.layer].name for t in profile.tensors[-2:]] == ["features.0", "features.0"]


def test_the_tied_output_of_gpt2_is_ready_at_the_end_where_its_embedding_is():
    profile = zoo.profile("gpt2")
    assert profile.tensors[-1].spec.name == "transformer.wte.weight"
    assert profile.tensors[-1].spec.size_bytes == 4 * 50_257 * 768
    assert profile.tensors[-1].layer == 0


def test_what_does_not_exist_is_refused_with_what_does():
    with pytest.raises(InputError, match=r"got 'resnet-50' \(did you mean resnet50\?\), expected one of alexnet"):
        zoo.profile("resnet-50")
    with pytest.raises(InputError, match="device: got 'abacus', expected one of k40"):
        zoo.profile("vgg16", device="abacus")
    with pytest.raises(InputError, match="batch: got 0"):
        zoo.profile("vgg16", batch=0)


def test_the_command_lists_shows_and_writes(tmp_path):
    listed = json.loads(invoke("zoo", "--json"))
    assert [row["name"] for row in listed] == list(zoo.names())
    assert all(math.isfinite(row["operations_per_sample"]) for row in listed)
    assert [row["source"] for row in listed] == [zoo.profile(name).source for name in zoo.names()]
    table = invoke("zoo", columns=80)
    assert "llama-1b" in table
    assert "…" not in table
    path = tmp_path / "profile.json"
    assert "calibrated to Mercury" in invoke("zoo", "vgg16", "--batch", 16, "--out", path)
    assert files.read(path, Profile) == zoo.profile("vgg16", batch=16)
    invoke("zoo", "vgg17", code=2)


def test_buses_have_their_figures_and_say_where_they_come_from():
    rows = {row["name"]: row for row in json.loads(invoke("zoo", "--buses", "--json"))}
    assert list(rows) == list(zoo.BUSES)
    rates = [rows[name]["bytes_per_second"] for name in ("pcie3", "pcie4", "nvlink2", "nvlink3", "nvlink4")]
    assert rates == sorted(rates)
    assert rates[2] == 6 * 20 * 10**9  # links, and GB/s of each
    assert zoo.bus("nvlink3", 8).reduce_scatter.bytes_per_second == rates[3] * 8 // 7
    text = invoke("zoo", "--buses", columns=80)
    assert "A100 SXM4, 12 NVLinks" in text
    assert "JEDEC" in text
    assert "--buses: got it with vgg16" in invoke("zoo", "vgg16", "--buses", code=2)
