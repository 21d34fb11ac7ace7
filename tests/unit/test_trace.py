from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import trace, zoo
from gradlane.core import files
from gradlane.core.profile import Profile
from gradlane.errors import FormatError, InputError
from gradlane.planning.fit import fit_network
from gradlane.trace import chakra
from gradlane.trace.source import load
from tests.commands import invoke

DATA = Path(__file__).parents[3] / "shared" / "data"
recorded = pytest.mark.skipif(not DATA.is_dir(), reason="the recordings of others are not beside this checkout")

PIPEDREAM = """\
node1 -- Input -- forward_compute_time=17.5, backward_compute_time=0.0, activation_size=1.0, parameter_size=0.000
node2 -- Conv2d(3, 64) -- forward_compute_time=2.0, backward_compute_time=3.0, activation_size=1.0, parameter_size=800.000
node4 -- Linear(9, 9) -- forward_compute_time=1.0, backward_compute_time=1.5, activation_size=1.0, parameter_size=400.000
node3 -- ReLU() -- forward_compute_time=0.5, backward_compute_time=0.25, activation_size=[1; 2], parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
"""
MG_WFBP = """\
I0214 distributed.cpp:112] [0, 10, 0, 0]
I0214 distributed.cpp:112] [1, 2, 0, 0]
I0214 distributed.cpp:112] [0, 10, 300.5, 99]
I0214 distributed.cpp:112] [1, 2, 300.5, 9]
I0214 distributed.cpp:112] [2, 100, 50, 9, 8]
"""


def event(name, ts, dur, cat="Operator", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def gradient(ts, shape):
    return event(trace.kineto.ACCUMULATE, ts, 2, tid=2, **{"Input Dims": [shape], "Input type": ["float"]})


def kineto(steps=2):
    """Steps of 100 us: a forward kernel from 10 to 30, backward kernels to 45 and 70, an update from 80 to 88."""
    events = []
    for step in range(steps):
        at, first = 1000.0 * step, 10 * step
        events += [
            event(f"ProfilerStep#{step}", at, 100),
            event("aten::conv2d", at + 5, 3),
            event("cudaLaunchKernel", at + 6, 1, "Runtime", correlation=first),
            event("forward", at + 10, 20, "Kernel", 7, correlation=first),
            event("ConvolutionBackward0", at + 12, 2, tid=2),
            event("cudaLaunchKernel", at + 13, 1, "Runtime", 2, correlation=first + 1),
            event("backward", at + 31, 14, "Kernel", 7, correlation=first + 1),
            gradient(at + 15, [4, 5]),
            gradient(at + 16, [4]),
            event("cudaLaunchKernel", at + 18, 1, "Runtime", 2, correlation=first + 2),
            event("backward", at + 45, 25, "Kernel", 7, correlation=first + 2),
            gradient(at + 20, [2, 5]),
            event("Optimizer.step#SGD.step", at + 30, 5),
            event("cudaLaunchKernel", at + 31, 1, "Runtime", correlation=first + 3),
            event("update", at + 80, 8, "Kernel", 7, correlation=first + 3),
        ]
    return {"schemaVersion": 1, "traceEvents": events}


def written(tmp_path, content, name="trace.txt"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_profiler_trace_tells_when_gradients_were_ready(tmp_path):
    profile = trace.read(written(tmp_path, kineto()))
    assert [(t.spec.size_bytes, t.ready_ns) for t in profile.tensors] == [(80, 15_000), (16, 15_000), (40, 40_000)]
    # what became ready at once is a layer; forward is shared out as backward is, updates by bytes
    assert [t.layer for t in profile.tensors] == [1, 1, 0]
    assert [(layer.forward_ns, layer.update_ns) for layer in profile.layers] == [(12_500, 2_353), (7_500, 5_647)]
    assert (profile.forward_ns, profile.backward_ns) == (20_000, 40_000)


def test_what_lies_between_the_parts_of_a_step_is_told(tmp_path):
    # of the 1000 us from one step to the next, 20 are forward, 40 backward and 8 the update
    told = "93% of a step of 1.00 ms lies between its parts and is left out"
    assert trace.read(written(tmp_path, kineto())).source.endswith(told)
    assert "left out" not in trace.read(written(tmp_path, kineto(steps=1))).source


def test_a_trace_of_the_cpu_has_gradients_ready_when_they_were_accumulated(tmp_path):
    events = [e for e in kineto()["traceEvents"] if e["cat"] == "Operator"]
    profile = trace.read(written(tmp_path, {"traceEvents": events}))
    assert [t.ready_ns for t in profile.tensors] == [5_000, 6_000, 10_000]
    assert profile.forward_ns == 7_000


def test_gradients_take_names_from_a_model_whose_sizes_are_theirs(tmp_path):
    path = written(tmp_path, kineto())
    specs = trace.read(path).specs
    renamed = tuple(type(spec)(f"model.{i}", spec.size_bytes) for i, spec in enumerate(specs))
    assert trace.read(path, tensors=renamed).specs == renamed
    with pytest.raises(FormatError, match="has 3 gradients, the model given has 2 tensors"):
        trace.read(path, tensors=renamed[:2])
    with pytest.raises(FormatError, match=r"gradient 0 has 80 bytes, model\.1 of the model given has 16"):
        trace.read(path, tensors=(renamed[1], renamed[0], renamed[2]))


def test_the_first_use_of_a_parameter_is_the_operation_whose_backward_ended_with_its_gradient(tmp_path):
    def forward(name, ts, dur, number):
        return event(name, ts, dur, "cpu_op", **{"Sequence number": number})

    def backward(name, ts, number):
        return event(f"autograd::engine::evaluate_function: {name}", ts, 5, **{"Sequence number": number, "Fwd thread id": 1})

    events = [
        forward("aten::rand", 2, 2, 7),  # bears the number of the next node and does not make it
        forward("aten::embedding", 10, 5, 7),
        forward("aten::linear", 20, 30, 8),
        forward("aten::t", 21, 2, 8),
        forward("aten::addmm", 25, 20, 9),
        forward("aten::linear", 60, 30, 10),  # with the embedding's parameter
        forward("aten::t", 61, 2, 10),
        backward("TBackward0", 100, 10),
        backward("AddmmBackward0", 110, 9),
        gradient(116, [6]),
        backward("TBackward0", 120, 8),
        gradient(126, [6, 6]),
        backward("EmbeddingBackward0", 130, 7),
        gradient(136, [9, 6]),
    ]
    profile = trace.read(written(tmp_path, {"traceEvents": [{**e, "tid": 1} for e in events]}))
    assert [(t.spec.size_bytes, t.layer) for t in profile.tensors] == [(24, 1), (144, 1), (216, 0)]
    # from the first operation of the step, at 2, to the second layer, at 20, to backward, at 100
    assert [(layer.name, layer.forward_ns) for layer in profile.layers] == [
        ("0.aten::embedding", 18_000),
        ("1.aten::linear", 80_000),
    ]


def test_neither_nccls_kernels_nor_the_devices_own_marks_of_steps_change_a_profile(tmp_path):
    events = kineto()["traceEvents"]
    plain = trace.read(written(tmp_path, {"traceEvents": events}))
    for step in range(2):
        at = 1000.0 * step
        events += [
            event("cudaLaunchKernelExC", at + 15.5, 1, "cuda_runtime", 2, correlation=100 + step),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 46, 40, "kernel", 20, correlation=100 + step),
            event(f"ProfilerStep#{step}", at + 10, 110, "gpu_user_annotation", 7),
            event("Optimizer.step#SGD.step", at + 80, 8, "gpu_user_annotation", 7),
        ]
    assert trace.read(written(tmp_path, {"traceEvents": events})) == plain


def test_accumulation_into_a_gradient_that_was_there_is_part_of_getting_ready(tmp_path):
    events = [
        *kineto(1)["traceEvents"],
        event("cudaLaunchKernel", 17, 0.5, "Runtime", 2, correlation=50),  # within the second gradient's accumulation
        event("add", 45, 0.25, "Kernel", 7, correlation=50),
    ]
    profile = trace.read(written(tmp_path, {"traceEvents": events}))
    assert [t.ready_ns for t in profile.tensors] == [15_000, 15_250, 40_000]


def test_without_marks_of_steps_each_ends_with_the_optimizers(tmp_path):
    marked = kineto(3)
    bare = {"traceEvents": [e for e in marked["traceEvents"] if not e["name"].startswith("ProfilerStep")]}
    profile = trace.read(written(tmp_path, bare))
    assert profile == trace.read(written(tmp_path, marked))
    assert "3 steps" in profile.source


def test_gradients_without_shapes_have_those_of_the_model_given(tmp_path):
    marked = kineto()
    specs = trace.read(written(tmp_path, marked)).specs
    for e in marked["traceEvents"]:
        e["args"].pop("Input Dims", None)
    path = written(tmp_path, marked)
    with pytest.raises(FormatError, match="gradients without shapes"):
        trace.read(path)
    assert trace.read(path, tensors=specs).specs == specs
    with pytest.raises(FormatError, match="has 3 gradients, the model given has 1 tensors"):
        trace.read(path, tensors=specs[:1])


def test_what_a_format_has_no_use_for_is_refused(tmp_path):
    specs = trace.read(written(tmp_path, kineto())).specs
    with pytest.raises(InputError, match="compute_ns: got 5 for a mg-wfbp file, expected none"):
        trace.read(written(tmp_path, MG_WFBP), compute_ns=5)
    with pytest.raises(InputError, match="tensors: got 3 for a pipedream file, expected none"):
        trace.read(written(tmp_path, PIPEDREAM), tensors=specs)
    with pytest.raises(InputError, match="format: got 'onnx', expected one of kineto, chakra, pipedream, mg-wfbp"):
        trace.read(written(tmp_path, PIPEDREAM), format="onnx")


def test_a_pipedream_graph_without_its_data_loading(tmp_path):
    profile = trace.read(written(tmp_path, PIPEDREAM))
    assert [(t.spec.name, t.spec.size_bytes, t.ready_ns) for t in profile.tensors] == [
        ("2.Linear(9, 9)", 400, 1_500_000),
        ("0.Conv2d(3, 64)", 800, 4_750_000),
    ]
    assert [layer.forward_ns for layer in profile.layers] == [2_000_000, 500_000, 1_000_000]


def test_an_mg_wfbp_log_counts_its_last_listing(tmp_path):
    profile = trace.read(written(tmp_path, MG_WFBP))
    assert [(t.spec.size_bytes, t.ready_ns) for t in profile.tensors] == [(400, 50_000), (48, 350_500)]
    assert profile.forward_ns == 175_250


def chakra_trace(*iterations):
    nodes = [{"id": 1, "name": "aten::view", "inputs": {"values": [], "shapes": [], "types": []}}]
    for shapes in iterations:
        for elements in shapes:
            inputs = {"values": [[1, 2, 0, elements, 4, "cuda:0"]], "shapes": [[elements]], "types": ["Tensor(float)"]}
            nodes.append({"id": len(nodes) + 1, "name": trace.kineto.ACCUMULATE, "inputs": inputs})
        nodes.append({"id": len(nodes) + 1, "name": "Optimizer.step#SGD.step", "inputs": {}})
    return {"schema": "1.1.0-chakra.0.0.4", "nodes": nodes}


def test_a_chakra_trace_has_sizes_and_needs_to_be_told_the_time(tmp_path):
    path = written(tmp_path, chakra_trace([10, 20, 10], [10, 20, 10]))
    with pytest.raises(FormatError, match="has no times"):
        trace.read(path)
    profile = trace.read(path, compute_ns=1000)
    assert [(t.spec.size_bytes, t.ready_ns) for t in profile.tensors] == [(40, 222), (80, 444), (40, 666)]
    assert profile.compute_ns == 1000


def test_a_chakra_trace_is_cut_at_the_optimizers_steps_and_in_order_of_number(tmp_path):
    alike = chakra_trace([10, 10, 10, 10])
    assert len(trace.read(written(tmp_path, alike), compute_ns=900).tensors) == 4
    backwards = chakra_trace([10, 20], [10, 20])
    backwards["nodes"].reverse()
    assert [t.spec.size_bytes for t in trace.read(written(tmp_path, backwards), compute_ns=900).tensors] == [40, 80]
    with pytest.raises(FormatError, match="iteration 1 has 1 gradients, the first has 2"):
        trace.read(written(tmp_path, chakra_trace([10, 20], [10])), compute_ns=900)


VALID = {"pipedream": PIPEDREAM, "mg-wfbp": MG_WFBP, "kineto": json.dumps(kineto()), "chakra": json.dumps(chakra_trace([3, 4]))}


@pytest.mark.parametrize("format", trace.FORMATS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_and_nothing_else(format, tmp_path_factory, data):
    content = bytearray(VALID[format].encode())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "trace"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        profile = trace.read(path, format=format, compute_ns=1_000_000 if format == "chakra" else None)
    except InputError:
        return
    assert profile.tensors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("hello", "got a file of no known format"),
        (PIPEDREAM.replace("time=3.0", "time=-3.0"), r"backward time: got -3.0, expected 0 to .* \(at line 2\)"),
        (PIPEDREAM.replace("node3 -- node4", "node3 -- node9"), r"an edge of node9, which is not there \(at line 7\)"),
        (PIPEDREAM + "\tnode4 -- node2\n", "the graph has a cycle"),
        (PIPEDREAM.replace("800.000", "1e30"), r"parameter size: got 1e30, expected .* \(at line 2\)"),
        (MG_WFBP.replace("[2, 100", "[3, 100"), r"got row 3, expected row 2 \(at line 5\)"),
        (MG_WFBP.replace("[1, 2, 300.5, 9]", "[1, 2, nan, 9]"), r"backward time: got nan.* \(at line 4\)"),
        (json.dumps(kineto())[:-40], "not a PyTorch profiler trace"),
        ({"traceEvents": []}, "no torch::autograd::AccumulateGrad in it"),
        ({"traceEvents": [gradient(1, [])] * 3 + [event("x", 1, -5)]}, r"dur -5.0.* \(at \$\.traceEvents\[3\]\)"),
        ({"traceEvents": [gradient(1, [1]), event("x", 1e308, 1)]}, r"got ts 1e\+308, .* \(at \$\.traceEvents\[1\]\)"),
        ({"traceEvents": [event(trace.kineto.ACCUMULATE, 1, 2)]}, "record_shapes=True"),
        ({"traceEvents": [gradient(1, [10**9, 10**9])]}, "a gradient of shape"),
        ({"traceEvents": [gradient(1, ["9"])]}, "expected a dense tensor of float, double"),
        ({"traceEvents": [event("k", 1, 2, "kernel", correlation=1), gradient(1, [1])]}, "kernels and no launches"),
        ({"traceEvents": [*kineto(1)["traceEvents"], event("ProfilerStep#1", 100, 9), gradient(101, [1])]}, "no kernel was"),
        ({"traceEvents": [event("x", 1, 2, correlation=[])]}, r"Expected `int`, got `array` - at `\$\.traceEvents\[0\]"),
        (PIPEDREAM + "\tnode4" + " " * 10_000, r"got 10006 characters, expected at most 10000 \(at line 8\)"),
        (chakra_trace([10**15]), r"a gradient of shape.* \(at \$\.nodes\[1\]\)"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_place(tmp_path, content, message):
    with pytest.raises(FormatError, match=message):
        trace.read(written(tmp_path, content))


def test_more_tensors_than_anybody_has_are_refused(tmp_path):
    rows = "".join(f"distributed.cpp:112] [{index}, 1, {index}, 0]\n" for index in range(100_002))
    with pytest.raises(FormatError, match="more than 100000 rows"):
        trace.read(written(tmp_path, rows))


def test_a_gzip_cut_short_is_refused(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(kineto()).encode())[:-20])
    with pytest.raises(FormatError, match="damaged or cut short"):
        trace.read(path)


def test_a_file_that_unpacks_to_more_than_it_may_is_refused_before_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr("gradlane.trace.source.MAX_BYTES", 10_000)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000))
    with pytest.raises(FormatError, match="more than 10000 bytes"):
        trace.read(path)


def test_the_command_converts(tmp_path):
    source, out = written(tmp_path, kineto()), tmp_path / "profile.json"
    said = invoke("convert", source, "--out", out)
    assert "3 tensors, 136 B, 2 layers; forward 20.00 us, backward 40.00 us" in said
    assert files.read(out, Profile) == trace.read(source)
    invoke("convert", written(tmp_path, "x", "y"), code=2)


# -- what others recorded ------------------------------------------------------------------------------------


@pytest.mark.slow
@recorded
def test_the_recorded_resnet_50_has_the_tensors_of_the_zoos():
    profile = trace.read(DATA / "traces" / "resnet50-v100-kineto.json.gz", tensors=zoo.profile("resnet50").specs)
    assert len(profile.tensors) == 161
    assert profile.tensors[-1].spec.name == "conv1.weight"
    # its forward pass, as anybody knows it: a layer is a convolution, a normalization or the classifier
    uses = Counter(layer.name.split("::")[1] for layer in profile.layers)
    assert uses == {"conv2d": 53, "batch_norm": 53, "linear": 1}
    assert [t.layer for t in profile.tensors[:4]] == [106, 106, 105, 105]
    assert 6 * profile.forward_ns > 4 * profile.backward_ns > 3 * profile.forward_ns
    assert "6 steps" in profile.source
    assert "23% of a step of 150.40 ms lies between its parts and is left out" in profile.source


@recorded
def test_the_recorded_chakra_trace_has_three_iterations_of_resnet_50_and_15_all_reduces():
    sizes, collectives = chakra.read_sizes(load(DATA / "traces" / "resnet-2gpu-chakra-et.json.gz"), "resnet")
    assert [size for size, _ in sizes][:2] == [4_000, 8_192_000]
    assert (len(sizes), sum(size for size, _ in sizes) // 4, collectives) == (161, 25_557_032, 15)


@recorded
@pytest.mark.parametrize("name", ["tmp2comm", "tmp4comm", "tmp8comm"])
def test_mg_wfbps_recording_is_caffes_googlenet(name):
    profile = trace.read(DATA / "b-caffe-googlenet-k80" / f"{name}.log")
    assert len(profile.tensors) == 64
    # biases of classifiers are padded there: 1024 elements for 1000 classes
    assert profile.size_bytes // 4 == 13_379_136


@recorded
def test_pipedreams_14_profiles_are_read_and_have_their_models_parameters():
    profiles = {path.name: trace.read(path) for path in (DATA / "pipedream-profiles").iterdir()}
    assert len(profiles) == 14
    for name, parameters in {
        "vgg16": 138_357_544,
        "resnet50": 25_557_032,
        "alexnet": 61_100_840,
        "resnet18": 11_689_512,
    }.items():
        assert profiles[f"image_classification_{name}_graph.txt"].size_bytes // 4 == parameters


@recorded
@pytest.mark.parametrize("name", ["vgg16", "resnet50", "alexnet"])
def test_where_the_zoo_puts_the_time_of_backward_is_near_where_pipedream_measured_it(name):
    """Of both profiles, when how much of the gradients' bytes is ready, as parts of backward: never far apart."""
    measured = trace.read(DATA / "pipedream-profiles" / f"image_classification_{name}_graph.txt")
    counted = zoo.profile(name)

    def when(profile, part):
        seen = 0
        for tensor in profile.tensors:
            seen += tensor.spec.size_bytes
            if seen >= part * profile.size_bytes:
                return tensor.ready_ns / profile.backward_ns
        raise AssertionError

    apart = [abs(when(measured, part / 10) - when(counted, part / 10)) for part in range(1, 11)]
    assert max(apart) < 0.25


@recorded
def test_the_recorded_all_reduces_can_be_fitted():
    points = trace.read_allreduce(DATA / "b-caffe-googlenet-k80" / "allreduce8.log")
    network = fit_network(points, workers=8)
    assert 0 < network.startup_ns < 10_000_000
    assert network.bytes_per_second > 10**8
