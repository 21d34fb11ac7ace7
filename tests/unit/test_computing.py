"""How fast a device computes, and whether a replica fits it: options of the planner."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane import zoo
from gradlane.core import files
from gradlane.errors import InputError
from gradlane.planning.questions.memory import Replica
from gradlane.zoo.devices import COMPUTE_DTYPES, DEVICES, DeviceSpec
from tests.commands import invoke

GIB = 2**30
DDP = ("--policy", "ddp", "--json")


def alone_ns(*options):
    (row,) = json.loads(invoke("simulate", *options, *DDP))["rows"]
    return row["oracle_ns"]


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
def test_halves_are_never_slower_than_float32_by_the_data_sheet(name):
    peaks = DEVICES[name].operations_per_second
    least = peaks["bfloat16" if name.startswith("tpu") else "float32"]  # TPUs have no float32 products
    assert all(least <= peak for peak in peaks.values())
    assert set(peaks) <= set(COMPUTE_DTYPES)


def test_hosts_of_four_tpus_are_planned_with_the_products_and_the_ring_that_they_have():
    place = ["--device", "tpu-v5p", "--workers", "64x4", "--bus", "1600gbit", "--rate", "200gbit"]
    of_one = ("alexnet", *place, "--policy", "wfbp", "--json")
    of_itself, of_a_ring = (invoke("plan", *of_one, *more) for more in ([], ["--algorithm", "ring"]))
    assert of_itself == of_a_ring
    for algorithm in ("auto", "nccl-2.21"):
        said = invoke("plan", "llama-1b", *place, "--algorithm", algorithm, code=2)
        assert f"--algorithm: got {algorithm} with --device tpu-v5p, which has no NCCL; expected ring" in said
    assert "TPU v5p, BF16 products" in invoke("plan", "llama-1b", *place, "--policy", "wfbp")
    said = invoke("plan", "llama-1b", *place, "--compute-dtype", "tf32", code=2)
    assert "expected one that TPU v5p has products of: bf16" in said


def test_a_device_is_a_row_of_data():
    row = {
        "title": "card", "memory_gib": 8, "bytes_per_second": 1e12, "operations_per_second": {"float32": 1e13},
        "default_dtype": "float32", "source": "here",
    }  # fmt: skip
    assert msgspec.convert(row, DeviceSpec).memory_bytes == 8 * GIB
    with pytest.raises(msgspec.ValidationError, match="default_dtype: got 'tf32'"):
        msgspec.convert({**row, "default_dtype": "tf32"}, DeviceSpec)


def test_devices_are_listed_with_what_their_data_sheets_say():
    assert "H200 data sheet" in invoke("zoo", "--devices")
    rows = {row["name"]: row for row in json.loads(invoke("zoo", "--devices", "--json"))}
    assert rows["h100"]["operations_per_second"]["bfloat16"] == 989e12
    assert "--devices: got it with vgg16" in invoke("zoo", "vgg16", "--devices", code=2)


# -- how fast ----------------------------------------------------------------------------------------------------------


def test_halves_compute_faster_and_the_plan_says_that_this_was_not_measured():
    whole, halves = zoo.profile("llama-1b"), zoo.profile("llama-1b", compute_dtype="bfloat16")
    assert halves.specs == whole.specs
    assert halves.update_ns == whole.update_ns
    # products take half of the time, and what only moves bytes too; launches of kernels take as long
    assert halves.forward_ns == pytest.approx(whole.forward_ns / 2, rel=0.05)
    assert "BF16 products" in halves.source
    # a measured total was measured in the device's own float32, not in halves
    assert "calibrated" in zoo.profile("resnet152", device="v100").source
    assert "not measured" in zoo.profile("resnet152", device="v100", compute_dtype="float16").source


@given(st.floats(0.01, 1), st.sampled_from(["resnet50", "llama-1b", "vit-b16"]), st.integers(8, 64))
def test_a_stated_part_of_the_peak_is_met_by_the_whole_step(part, name, batch):
    profile = zoo.profile(name, device="h100", batch=batch, compute_dtype="bfloat16", mfu=part)
    operations = 3 * batch * zoo.describe(name).operations
    assert operations / (profile.compute_ns / 1e9) / 989e12 == pytest.approx(part, rel=1e-3)


def test_a_stated_step_stretches_everything_alike(tmp_path):
    assert alone_ns("resnet50") != 50_000_000
    assert alone_ns("resnet50", "--step-time", "50ms") == 50_000_000
    path = tmp_path / "profile.json"
    files.write(path, zoo.profile("resnet18"))
    assert alone_ns(path, "--step-time", "50ms") == 50_000_000
    assert "a step of 50.00 ms as stated" in invoke("plan", path, "--step-time", "50ms", "--policy", "ddp")


@given(st.integers(0, 10**12), st.sampled_from(["resnet50", "alexnet"]))
def test_a_step_lasts_what_is_stated_and_its_parts_are_in_proportion(step_ns, name):
    profile = zoo.profile(name)
    lasting = profile.lasting(step_ns)
    assert lasting.compute_ns == step_ns
    assert lasting.tensors[-1].ready_ns <= lasting.backward_ns
    for was, is_now in zip(profile.layers, lasting.layers, strict=True):
        assert abs(is_now.forward_ns - was.forward_ns * step_ns / profile.compute_ns) <= 1


@pytest.mark.parametrize("command", [("plan",), ("simulate",), ("whatif", "workers")])
def test_every_question_takes_how_fast_the_device_is(command):
    options = ("--device", "h100", "--compute-dtype", "bf16", "--mfu", "40%", "--workers", "2", "--policy", "ddp")
    text = invoke(*command, "resnet50", *options, "--json")
    assert invoke(*command, "resnet50", *options[:2], "--workers", "2", "--policy", "ddp", "--json") != text
    assert invoke(*command, "resnet50", *options[:5], "0.4", *options[6:], "--json") == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mfu", "0"), "expected a part, more than 0 and at most 1"),
        (("--mfu", "140%"), "expected a part"),
        (("--mfu", "x"), "expected a part"),
        (("--mfu", "0.5", "--step-time", "1s"), "--mfu: got it with --step-time"),
        (("--step-time", "0ms"), "--step-time: got '0ms', expected more than zero"),
        (("--compute-dtype", "bf16", "--device", "v100"), "Tesla V100 PCIe has products of: fp32, fp16"),
    ],
)
def test_what_cannot_be_computed_is_refused(options, message):
    assert message in invoke("plan", "resnet50", *options, code=2)


def test_a_file_has_its_own_device(tmp_path):
    path = tmp_path / "profile.json"
    files.write(path, zoo.profile("resnet18"))
    text = invoke("plan", path, "--mfu", "0.4", "--compute-dtype", "bf16", code=2)
    assert "--compute-dtype, --mfu: got them with the file" in text


# -- memory ------------------------------------------------------------------------------------------------------------


def test_eight_billion_parameters_under_adam_take_16_bytes_each():
    replica = Replica(32 * 10**9, 32 * 10**9, None, None, "card", 80 * GIB)
    assert replica.total == 128 * 10**9
    assert not replica.fits
    # halves take 64 GB, a shard of two devices 64 GB; without Adam's second state 96 GB do not fit
    assert "parameters, gradients and states in bfloat16" in replica.remedy()
    assert "sharding all three over 2 or more devices" in replica.remedy()
    assert "momentum" not in replica.remedy()


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.integers(1, 512), st.integers(10**9, 10**12))
def test_what_would_fit_fits(parameters, activations, batch, capacity):
    replica = Replica(parameters, parameters, activations, batch, "card", capacity)
    if replica.fits:
        return
    text = replica.remedy()
    kept = activations // batch if "with a batch of 1, " in text else 0 if "recomputed, " in text else activations
    room = capacity - kept
    assert room > 0 or "may not fit" in text
    if "momentum SGD" in text:
        assert 3 * parameters <= room
    if "in bfloat16" in text:
        assert 2 * parameters <= room
    if "or less" in text:
        smaller = int(text.split("a batch of ")[1].split()[0])
        assert 0 < smaller < batch
        assert replica.lasting + activations * smaller // batch <= capacity
    if "sharding" in text:
        shards = int(text.split("over ")[1].split()[0])
        assert replica.lasting <= shards * room


def test_activations_are_what_every_kernel_writes_once():
    # a linear layer of 8 outputs, ten samples, float32, from the zoo's own counting of AlexNet's last layer
    assert zoo.activation_bytes("resnet50", 2, "float32") == 2 * zoo.activation_bytes("resnet50", 1, "float32")
    assert zoo.activation_bytes("resnet50", 1, "bfloat16") * 2 == zoo.activation_bytes("resnet50", 1, "float32")
    # the published count of ResNet-50's convolutions' outputs is 11.1 million a sample (Dollar et al. 2021, Table 1);
    # normalization and activation write about as much each
    assert 2.5 < zoo.activation_bytes("resnet50", 1, "float32") / 4 / 11.1e6 < 3.5


def test_whether_a_model_of_a_file_fits_is_not_known_where_its_activations_are_not(tmp_path):
    invoke("zoo", "vgg16", "--batch", "128", "--out", tmp_path / "vgg16.json")
    of_file = ("plan", tmp_path / "vgg16.json", "--workers", "2", "--policy", "ddp")
    assert json.loads(invoke(*of_file, "--json"))["memory"]["fits"] is None
    assert "activations not known" in invoke(*of_file)
    assert json.loads(invoke("plan", "vgg16", "--batch", "128", "--workers", "2", "--json"))["memory"]["fits"] is False


def test_a_plan_says_whether_a_replica_fits_and_what_would():
    fits = ("plan", "resnet50", "--device", "v100", "--workers", "2", "--policy", "ddp")
    assert json.loads(invoke(*fits, "--json"))["memory"]["fits"] is True
    assert "Adam's states" in invoke(*fits)
    not_ = ("llama-1b", "--device", "t4", "--workers", "2", "--policy", "ddp")
    memory = json.loads(invoke("plan", *not_, "--json"))["memory"]
    assert memory["fits"] is False
    assert memory["total"] == 16 * 1_235_814_400 + memory["activations"]
    for command in (("plan",), ("simulate",), ("whatif", "workers")):
        assert "a replica does not fit" in invoke(*command, *not_)


def test_the_memory_of_a_file_is_told_where_its_device_is_known(tmp_path):
    path = tmp_path / "profile.json"
    files.write(path, zoo.profile("resnet18"))
    memory = json.loads(invoke("plan", path, "--workers", "2", *DDP))["memory"]
    assert (memory["parameters"], memory["activations"]) == (4 * 11_689_512, None)
    files.write(path, msgspec.structs.replace(zoo.profile("resnet18"), device="a card of mine"))
    assert json.loads(invoke("plan", path, "--workers", "2", *DDP))["memory"] is None


def test_a_part_out_of_range_is_refused_by_the_zoo_too():
    with pytest.raises(InputError, match="mfu: got 2"):
        zoo.profile("resnet50", mfu=2)
