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
from gradlane.trace.device import LATENCY_US, PAUSE_US, DeviceClock, Intervals, Work
from gradlane.trace.events import ACCUMULATE, MARK
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
    return event(ACCUMULATE, ts, 2, tid=2, **{"Input Dims": [shape], "Input type": ["float"]})


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
    assert [(layer.forward_ns, layer.update_ns) for layer in profile.layers] == [(15_625, 5_294), (9_375, 12_706)]
    # forward from its operation on, at 5; the update from the end of backward on, for its kernel is launched by then
    assert (profile.forward_ns, profile.backward_ns, profile.update_ns) == (25_000, 40_000, 18_000)


def test_what_no_part_covers_of_a_step_is_uncovered_time(tmp_path):
    # of the 1000 us from one step to the next, 25 are forward, 40 backward and 18 the update
    profile = trace.read(written(tmp_path, kineto()))
    assert profile.uncovered_ns == 917_000
    assert profile.source.endswith("92% of a step of 1.00 ms is uncovered time")
    # a step alone is as long as its mark says, and without one nobody knows
    assert trace.read(written(tmp_path, kineto(steps=1))).uncovered_ns == 17_000
    bare = {"traceEvents": [e for e in kineto(steps=1)["traceEvents"] if not e["name"].startswith("ProfilerStep")]}
    alone = trace.read(written(tmp_path, bare))
    assert alone.uncovered_ns == 0
    assert alone.source.endswith("the time between steps is not known of one step")


def test_uncovered_time_is_that_of_a_step_where_in_each_another_part_is_slow(tmp_path):
    events, at = [], 0.0
    for step, (forward, backward) in enumerate([(17_000, 500), (500, 17_000), (500, 500), (17_000, 500), (500, 17_000)]):
        began = at + 100
        ready = began + forward + backward
        events += [
            event(f"ProfilerStep#{step}", at, forward + backward + 200),
            event("aten::linear", began, forward, **{"Sequence number": step}),
            event(f"{MARK}: AddmmBackward0", began + forward, backward - 2),
            event("AddmmBackward0", began + forward, backward - 2, **{"Sequence number": step, "Fwd thread id": 1}),
            event(f"{MARK}: {ACCUMULATE}", ready - 2, 2),
            gradient(ready - 2, [256]) | {"tid": 1},
            event("Optimizer.step#SGD.step", ready, 100),
        ]
        at = ready + 100
    profile = trace.read(written(tmp_path, {"schemaVersion": 1, "traceEvents": events}))
    assert (profile.forward_ns, profile.backward_ns, profile.update_ns) == (500_000, 500_000, 100_000)
    assert profile.uncovered_ns == 100_000
    assert "steps differ: their parts' medians add up to 1.20 ms, a step takes 17.70 ms; record more steps" in profile.source


class Recording:
    """Events of steps of 110 ms, whose operations launch kernels; those of backward on a thread of their own."""

    def __init__(self):
        self.events = []
        self.numbers = iter(range(10_000))

    def op(self, name, ts, dur, tid=1, **args):
        self.events.append(event(name, ts, dur, "cpu_op", tid, **args))

    def work(self, launched, ts, dur, name="gemm", cat="kernel", tid=1, stream=7):
        number = next(self.numbers)
        self.events.append(event("cudaLaunchKernel", launched, 1, "cuda_runtime", tid, correlation=number))
        self.events.append(event(name, ts, dur, cat, stream, correlation=number))

    def step(self, number):
        """Forward is 10 us of launching and 2 ms of a kernel from 100 ms on, backward a kernel of 4 ms, the update 0.5 ms."""
        t = 110_000 * number
        self.events.append(event(f"ProfilerStep#{number}", t, 109_999, "user_annotation"))
        self.op("aten::linear", t + 100_000, 10, **{"Sequence number": 5})
        self.work(t + 100_002, t + 100_010, 2_000)
        node = {"Sequence number": 5, "Fwd thread id": 1}
        self.op("autograd::engine::evaluate_function: AddmmBackward0", t + 100_100, 20, 2, **node)
        self.work(t + 100_110, t + 102_010, 4_000, tid=2)
        self.op(ACCUMULATE, t + 100_130, 10, 2, **{"Input Dims": [[1000, 1000]], "Input type": ["float"]})
        self.events.append(event("Optimizer.step#SGD.step", t + 100_200, 20, "user_annotation"))
        self.work(t + 100_205, t + 106_010, 500, "sgd")
        return t

    def read(self, tmp_path, **changes):
        return trace.read(written(tmp_path, {"traceEvents": [e | changes for e in self.events]}))


def parts_us(profile):
    return tuple(ns // 1000 for ns in (profile.forward_ns, profile.backward_ns, profile.update_ns, profile.uncovered_ns))


def test_waiting_for_inputs_is_uncovered_time_and_no_part_of_the_forward_pass(tmp_path):
    recording = Recording()
    for number in range(3):
        t = recording.step(number)
        recording.op("aten::add_", t + 5, 10)  # a running loss
        recording.work(t + 6, t + 20, 3, "metric")
    profile = recording.read(tmp_path)
    assert parts_us(profile) == (2_010, 4_000, 500, 103_490)
    assert profile.compute_ns == 110_000_000
    out = tmp_path / "profile.json"
    said = invoke("convert", written(tmp_path, {"traceEvents": recording.events}), "--out", out)
    assert "forward 2.01 ms, backward 4.00 ms, update 500.00 us, uncovered 103.49 ms" in said
    # and commands count it: a sum of 2 ms is hidden behind it if it crosses the barrier, and adds to it if it does not
    network = ("--rate", "16gbit", "--workers", "2", "--startup", "0ns")
    told = {row["policy"]: row for row in json.loads(invoke("simulate", out, *network, "--json"))["rows"]}
    assert {row["oracle_ns"] for row in told.values()} == {110_000_000}
    assert told["ddp"]["iteration_ns"] == 110_000_000 + 2_000_000
    assert told["blocks"]["iteration_ns"] == told["blocks"]["bound_ns"] == 110_000_000
    for command in ("simulate", "plan"):
        assert "computation alone takes 110.00 ms, of which 103.49 ms is uncovered time" in invoke(command, out, *network)
    # without sequence numbers the pause alone tells: the running loss, from its operation on, counts as forward
    for each in recording.events:
        each["args"].pop("Sequence number", None)
    assert parts_us(recording.read(tmp_path)) == (2_028, 4_000, 500, 103_472)


def test_on_the_cpu_too_waiting_for_inputs_is_uncovered_time(tmp_path):
    recording = Recording()
    for number in range(3):
        t = recording.step(number)
        recording.op("aten::add_", t + 5, 10)
        recording.op("aten::cross_entropy", t + 100_050, 40)
    recording.events = [e for e in recording.events if e["cat"] in ("cpu_op", "user_annotation")]
    assert parts_us(recording.read(tmp_path)) == (100, 40, 20, 109_840)
    for each in recording.events:
        each["args"].pop("Sequence number", None)
    assert parts_us(recording.read(tmp_path)) == (110, 40, 20, 109_830)


@pytest.mark.parametrize("stream", [7, 21])  # of the kernels, and beside them
def test_copying_inputs_to_the_device_is_uncovered_time(tmp_path, stream):
    recording = Recording()
    for number in range(3):
        before = len(recording.events)
        t = recording.step(number)
        for each in recording.events[before:]:
            if each["cat"] == "kernel":
                each["ts"] += 50_000
        # without waiting for it; the forward pass that is launched meanwhile waits for its end, 50 ms after its launch
        recording.op("aten::to", t + 99_000, 20)
        recording.work(t + 99_005, t + 99_010, 51_000, "Memcpy HtoD", "gpu_memcpy", stream=stream)
    forward_us, *others = parts_us(recording.read(tmp_path))
    assert others == [4_000, 500, 110_000 - 4_500 - forward_us]
    # beside kernels, 50 us of the wait may be the launch's, after 2 of the operation
    assert forward_us == (2_000 if stream == 7 else 2_052)


def test_sums_that_are_waited_for_are_left_out_and_other_collectives_are_uncovered_time(tmp_path):
    def recorded(collective):
        recording = Recording()
        for number in range(3):
            t = recording.step(number)
            # the update, launched long before, comes when the collective has ended, 3 ms after the backward pass
            recording.work(t + 100_140, t + 105_000, 4_010, collective, tid=2, stream=20)
            update = next(e for e in recording.events if e["name"] == "sgd" and e["ts"] >= t)
            update["ts"] = t + 109_010
        return recording.read(tmp_path)

    summed, exchanged = (recorded(f"ncclDevKernel_{what}_RING_LL") for what in ("AllReduce_Sum_f32", "SendRecv"))
    # 50 us of the wait may be the launch's
    assert parts_us(summed) == (2_010, 4_000, 550, 110_000 - 6_560 - 2_950)
    assert "sums were waited for in 2.95 ms of a step, which are left out" in summed.source
    assert parts_us(exchanged) == (2_010, 4_000, 550, 110_000 - 6_560)


def test_an_optimizer_that_is_made_of_several_takes_its_time_once(tmp_path):
    recording = Recording()
    for number in range(2):
        t = recording.step(number)
        recording.events.append(event("Optimizer.step#Together.step", t + 100_195, 40, "user_annotation"))
    assert parts_us(recording.read(tmp_path))[2] == 500


def test_what_a_closure_computes_is_no_update(tmp_path):
    recording = Recording()
    for number in range(2):
        t = recording.step(number)
        step = next(e for e in reversed(recording.events) if e["name"].startswith("Optimizer.step"))
        step |= {"ts": t + 99_990, "dur": 240}
    assert parts_us(recording.read(tmp_path)) == (2_010, 4_000, 500, 110_000 - 6_510)


def test_without_marks_of_steps_one_ends_with_the_last_of_several_optimizers(tmp_path):
    recording = Recording()
    for number in range(3):
        t = recording.step(number)
        recording.events.append(event("Optimizer.step#Adam.step", t + 100_230, 20, "user_annotation"))
        recording.work(t + 100_235, t + 106_510, 700, "adam")
    marked = recording.read(tmp_path)
    recording.events = [e for e in recording.events if not e["name"].startswith("ProfilerStep")]
    assert parts_us(recording.read(tmp_path)) == parts_us(marked) == (2_010, 4_000, 1_200, 110_000 - 7_210)


def test_waits_for_sums_of_the_host_are_left_out_where_no_operation_runs(tmp_path):
    recording = Recording()
    for number in range(3):
        t = recording.step(number)
        recording.events += [event("gloo:all_reduce", t + begin, 3_000, "user_annotation", 3) for begin in (100_135, 101_000)]
        recording.op("aten::add_", t + 102_000, 100)
    recording.events = [e for e in recording.events if e["cat"] in ("cpu_op", "user_annotation")]
    profile = recording.read(tmp_path)
    # from 5 us behind the last operation of the backward pass to 104 ms, without what runs meanwhile
    assert "sums were waited for in 3.76 ms of a step, which are left out" in profile.source
    assert sum(parts_us(profile)) == 110_000 - 3_760


def checkpointed(inputs, *inside):
    """A step with a reentrant checkpoint around operations with parameters of these shapes."""

    def op(name, ts, dur, number, **args):
        return event(name, ts, dur, "cpu_op", **{"Sequence number": number} | args)

    node = {"Sequence number": 7, "Fwd thread id": 1}
    return [
        op("aten::linear", 5, 2, 6),
        op("CheckpointFunction", 10, 5, 7, **{"Input Dims": [[], *inputs], "Input type": ["Scalar", "float"]}),
        op("aten::linear", 20, 2, 8),
        event("autograd::engine::evaluate_function: AddmmBackward0", 100, 5, "cpu_op", **node | {"Sequence number": 8}),
        event("AddmmBackward0", 101, 3, "cpu_op", **node | {"Sequence number": 8}),
        gradient(106, [6]),
        event("autograd::engine::evaluate_function: CheckpointFunctionBackward", 110, 60, "cpu_op", **node),
        event("CheckpointFunctionBackward", 111, 58, "cpu_op", **node),
        op("aten::linear", 112, 2, 9),
        *(gradient(120 + 4 * number, shape) for number, shape in enumerate(inside)),
        gradient(176, [5]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "inside", "left"),
    [
        ([[8, 6]], ([6, 6], [8, 6], [6]), [6, 36, 6, 5]),
        ([[8, 6]], ([6, 6], [6]), [6, 36, 6, 5]),  # of an input that needs no gradient there is none
        ([[6, 6]], ([6, 6], [6], [6, 6]), [6, 36, 6, 5]),  # whichever of two that are alike
        ([[8, 6], [8, 6]], ([8, 6], [6], [8, 6]), [6, 6, 5]),
        ([], ([6, 6],), [6, 36, 5]),
    ],
)
def test_inputs_of_a_reentrant_checkpoint_are_no_parameters(tmp_path, inputs, inside, left):
    events = [{**e, "tid": 1} for e in checkpointed(inputs, *inside)]
    profile = trace.read(written(tmp_path, {"traceEvents": events}))
    assert [spec.size_bytes // 4 for spec in profile.specs] == left
    count = len(inside) + 2 - len(left)
    assert (f"{count} inputs of checkpoints are left out" in profile.source) == (count > 0)


@pytest.mark.parametrize("between", ["aten::linear", "aten::ones_like"])
def test_a_step_with_several_backward_passes_is_refused(tmp_path, between):
    events = [{**e, "tid": 1} for e in checkpointed([])]
    trace.read(written(tmp_path, {"traceEvents": events}))
    events.append(event(between, 173, 1, "cpu_op"))
    with pytest.raises(FormatError, match=f"step 0: {between} runs between gradients, so that there are several backward"):
        trace.read(written(tmp_path, {"traceEvents": events}))
    # on a thread of its own, which has loaded inputs ahead of the backward pass; or within a backward operation, in no time
    beside = [event("aten::stack", 1, 1, "cpu_op", tid=9, **{"Sequence number": 2}), events[-1] | {"tid": 9}]
    trace.read(written(tmp_path, {"traceEvents": [*events[:-1], *beside]}))
    trace.read(written(tmp_path, {"traceEvents": [*events[:-1], events[-1] | {"ts": 150, "dur": 0}]}))


def test_all_kernels_of_one_launch_count(tmp_path):
    recording = Recording()
    for number in range(2):
        recording.step(number)
        graph = next(e for e in reversed(recording.events) if e["name"] == "gemm")
        recording.events.append(graph | {"ts": graph["ts"] + 4_002, "dur": 1_000})  # 2 us after the kernel before it
        update = next(e for e in reversed(recording.events) if e["name"] == "sgd")
        update["ts"] += 1_002
    assert parts_us(recording.read(tmp_path)) == (2_010, 5_002, 500, 110_000 - 7_512)


def test_kernels_that_are_not_in_the_trace_are_told_of(tmp_path):
    recording = Recording()
    for number in range(2):
        recording.step(number)
    recording.events = [e for e in recording.events if e["cat"] != "kernel"]
    assert "no kernels in it: times are the host's" in recording.read(tmp_path).source


def test_parameters_without_a_gradient_are_left_out_with_a_note(tmp_path):
    recording, none = Recording(), {"Input Dims": [[]], "Input type": [""]}
    for number in range(2):
        t = recording.step(number)
        recording.op(ACCUMULATE, t + 100_125, 1, 2, **none)
        scalar = {"Input Dims": [[]], "Input type": ["float"]}
        recording.op(ACCUMULATE, t + 100_145, 1, 2, **scalar)
    profile = recording.read(tmp_path)
    assert [spec.size_bytes for spec in profile.specs] == [4_000_000, 4]
    assert profile.source.endswith("1 parameters without a gradient are left out")
    spaced = json.dumps({"traceEvents": recording.events}, indent=1)
    assert trace.read(written(tmp_path, spaced)) == profile
    recording.events = [e for e in recording.events if e["args"].get("Input type") in (None, [""])]
    with pytest.raises(FormatError, match="no torch::autograd::AccumulateGrad with a gradient in it"):
        recording.read(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path):
    recorded = written(tmp_path, kineto())
    profile = trace.read(recorded)
    recorded.write_bytes(b"\xef\xbb\xbf" + recorded.read_bytes())
    assert trace.read(recorded) == profile


def test_events_alone_are_a_trace_too(tmp_path):
    recorded = kineto()
    assert trace.read(written(tmp_path, recorded["traceEvents"])) == trace.read(written(tmp_path, recorded))
    legacy = [e | {"pid": "CUDA functions"} if e["cat"] == "Kernel" else e for e in recorded["traceEvents"]]
    with pytest.raises(FormatError, match=r"kernels without launches, of torch.autograd.profiler; .* \(at \$\[\d+\]\)"):
        trace.read(written(tmp_path, legacy))
    with pytest.raises(FormatError, match=r"got ts 1.0, dur -5.0.* \(at \$\[1\]\)"):
        trace.read(written(tmp_path, [gradient(1, [1]), event("x", 1, -5)]))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=8),
    st.lists(st.integers(0, 80), min_size=2, max_size=2),
    st.integers(0, 9),
)
def test_intervals_cover_what_they_cover_unit_by_unit(pairs, ends, longer_than):
    units = {at for start, length in pairs for at in range(start, start + length)}
    intervals = Intervals((start, start + length) for start, length in pairs)
    assert intervals.within(*ends) == sum(at in units for at in range(*ends))
    touched = {at for start, length in pairs for at in (start - 0.5, *range(start, start + length), start + length - 0.5)}
    free = [at for at in range(81) if at not in units and min(touched, default=99) <= at <= max(touched, default=-1)]
    runs = []
    for at in free:
        if runs and runs[-1][-1] == at - 1 and not any(start == at and not length for start, length in pairs):
            runs[-1].append(at)
        else:
            runs.append([at])
    assert sum(len(run) for run in runs if len(run) > longer_than) == sum(end - at for at, end in intervals.gaps(longer_than))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_part_takes_its_busy_time_and_the_gaps_that_launches_explain_unit_by_unit(data):
    """Of work that runs one after another, each unit of 10 us is looked at alone."""

    def drawn(most):
        return 10 * data.draw(st.integers(0, most // 10))

    work, launched, free = [], 0, 0
    for _ in range(data.draw(st.integers(1, 7))):
        launched += 10 + drawn(1_500)
        started = max(launched, free) + drawn(data.draw(st.sampled_from((0, 200))))
        free = started + drawn(400)
        work.append(Work(launched, started, free))
    host = [(drawn(launched), drawn(1_500)) for _ in range(data.draw(st.integers(0, 3)))]
    host += [(each.launched_us, 10) for each in work]
    busy = Intervals((at, at + length) for at, length in host)
    pauses = list(busy.gaps(PAUSE_US))
    clock = DeviceClock(work, Intervals([]), busy)
    since = drawn(launched)
    until = since + drawn(launched + 10 - since)
    here = [place for place, each in enumerate(work) if since <= each.launched_us < until]
    part = clock.part(since, until)
    if not here:
        assert part is None
        return
    expected, free = 0, max(since, work[here[0] - 1].ended_us if here[0] else since)
    for place in here:
        each = work[place]
        for at in range(free, each.started_us, 10):
            paused = any(begin <= at < end for begin, end in pauses)
            explained = not paused if at < each.launched_us else at < max(free, each.launched_us) + LATENCY_US
            expected += 10 * explained
        expected += each.ended_us - each.started_us
        free = each.ended_us
        assert clock.took_us(part, each.launched_us + 0.5) == expected
    assert clock.took_us(part) == expected


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
    with pytest.raises(FormatError, match=r"gradient 0 has 80 bytes of float32, model\.1 of the model given has 16"):
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
    # from the first use, at 10, to the second layer, at 20, to backward, at 100
    assert [(layer.name, layer.forward_ns) for layer in profile.layers] == [
        ("0.aten::embedding", 10_000),
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
    with pytest.raises(InputError, match="compute_ns: got it for a mg-wfbp file, expected none"):
        trace.read(written(tmp_path, MG_WFBP), compute_ns=5)
    with pytest.raises(InputError, match="tensors: got them for a pipedream file, expected none"):
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


@pytest.mark.parametrize("rows", [1, 2])
def test_a_listing_that_an_mg_wfbp_log_cuts_short_does_not_count(tmp_path, rows):
    cut = "".join(f"{line}\n" for line in MG_WFBP.splitlines()[2 : 2 + rows])
    assert trace.read(written(tmp_path, MG_WFBP + cut)).tensors == trace.read(written(tmp_path, MG_WFBP)).tensors


def test_of_two_whole_listings_the_later_one_counts_if_a_third_is_cut_short(tmp_path):
    measured = "".join(f"{line}\n" for line in MG_WFBP.splitlines()[2:])
    unmeasured = measured.replace("300.5", "0").replace("50, 9, 8", "0, 0, 0")
    log = unmeasured + measured + measured.splitlines()[0] + "\n"
    assert trace.read(written(tmp_path, log)).tensors == trace.read(written(tmp_path, MG_WFBP)).tensors


def test_a_hidden_file_names_its_model_as_any_other(tmp_path):
    assert trace.read(written(tmp_path, MG_WFBP, ".recorded.log")).model == "recorded"


def chakra_trace(*iterations):
    nodes = [{"id": 1, "name": "aten::view", "inputs": {"values": [], "shapes": [], "types": []}}]
    for shapes in iterations:
        for elements in shapes:
            inputs = {"values": [[1, 2, 0, elements, 4, "cuda:0"]], "shapes": [[elements]], "types": ["Tensor(float)"]}
            nodes.append({"id": len(nodes) + 1, "name": ACCUMULATE, "inputs": inputs})
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


@pytest.mark.parametrize("within", ["ctrl_deps", "parent"])
def test_an_execution_trace_with_several_backward_passes_in_a_step_is_refused(tmp_path, within):
    recorded = chakra_trace([10, 20], [10, 20])
    nodes = [*recorded["nodes"][:2], {"id": 2.5, "name": "aten::ones_like", "inputs": {}}, *recorded["nodes"][2:]]
    recorded["nodes"] = [node | {"id": number + 1, within: 99} for number, node in enumerate(nodes)]
    with pytest.raises(FormatError, match="iteration 0: aten::ones_like runs between gradients"):
        trace.read(written(tmp_path, recorded), compute_ns=900)
    recorded["nodes"][2][within] = 98  # on another thread, or in a backward operation
    assert len(trace.read(written(tmp_path, recorded), compute_ns=900).tensors) == 2


def test_an_execution_trace_without_optimizers_has_one_backward_pass(tmp_path):
    recorded = chakra_trace([10, 20])
    nodes = [node for node in recorded["nodes"] if not node["name"].startswith("Optimizer")]
    thread = {"id": 1, "name": "[pytorch|profiler|execution_trace|thread]", "inputs": {}}
    once = [thread, *({**node, "id": number, "ctrl_deps": 1} for number, node in enumerate(nodes, 2))]
    assert len(trace.read(written(tmp_path, recorded | {"nodes": once}), compute_ns=900).tensors) == 2
    twice = [*once, *({**node, "id": number, "ctrl_deps": 1} for number, node in enumerate(nodes, len(once) + 1))]
    with pytest.raises(FormatError, match=r"aten::view runs between .* Without Optimizer\.step nothing tells steps apart"):
        trace.read(written(tmp_path, recorded | {"nodes": twice}), compute_ns=900)


def test_an_execution_trace_has_each_node_once_and_gradients_of_floats(tmp_path):
    recorded = chakra_trace([10, 20])
    with pytest.raises(FormatError, match="a second node 1; give the trace of one rank"):
        trace.read(written(tmp_path, recorded | {"nodes": 2 * recorded["nodes"]}), compute_ns=900)
    recorded["nodes"][1]["inputs"]["types"] = ["Tensor(int)"]
    with pytest.raises(
        FormatError, match=r"got a gradient of 'Tensor\(int\)' with 4 bytes an element, expected a tensor of float"
    ):
        trace.read(written(tmp_path, recorded), compute_ns=900)


def old_trace(*iterations):
    """As `chakra_trace`, of schema 1.0.1: shapes and types beside the inputs."""
    recorded = chakra_trace(*iterations)
    for node in recorded["nodes"]:
        inputs = node.pop("inputs")
        node |= {
            "inputs": inputs.get("values", []),
            "input_shapes": inputs.get("shapes", []),
            "input_types": inputs.get("types", []),
        }
    return {"schema": "1.0.1", "pid": 1, "nodes": recorded["nodes"]}


def test_an_execution_trace_of_schema_1_0_1_is_read_as_chakras(tmp_path):
    old, new = (trace.read(written(tmp_path, each([10, 20, 10])), compute_ns=1000) for each in (old_trace, chakra_trace))
    assert old == new


def test_parameters_without_a_gradient_are_left_out_of_execution_traces_too(tmp_path):
    for recorded in (chakra_trace([10, 20], [10, 20]), old_trace([10, 20], [10, 20])):
        for node in recorded["nodes"]:
            if node["name"] == ACCUMULATE and "20" in str(node["inputs"]):
                inputs = node["inputs"] if isinstance(node["inputs"], dict) else node
                values, shapes, types = (
                    ("values", "shapes", "types") if inputs is not node else ("inputs", "input_shapes", "input_types")
                )
                inputs |= {values: [[507, 0, 0, 0, 0, ""]], shapes: [[]], types: ["Tensor(nullptr (uninitialized))"]}
        profile = trace.read(written(tmp_path, recorded), compute_ns=900)
        assert [spec.size_bytes for spec in profile.specs] == [40]
        assert profile.source.endswith("1 parameters without a gradient are left out")


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
        ("", "got an empty file"),
        ("hello", "got a file of no known format"),
        (PIPEDREAM.replace("time=3.0", "time=-3.0"), r"backward time: got -3.0, expected 0 to .* \(at line 2\)"),
        (PIPEDREAM.replace("node3 -- node4", "node3 -- node9"), r"an edge of node9, which is not there \(at line 7\)"),
        (PIPEDREAM + "\tnode4 -- node2\n", "the graph has a cycle"),
        (
            PIPEDREAM.replace("800.000", "800.500"),
            r"parameter size: got 800.500 bytes, expected .* elements \(at line 2\)",
        ),
        (PIPEDREAM.partition("\t")[0], r"node1 has no edge; is the file cut short\?"),
        (PIPEDREAM.replace("800.000", "1e30"), r"parameter size: got 1e30, expected .* \(at line 2\)"),
        (MG_WFBP.replace("[2, 100", "[3, 100"), r"got row 3, expected row 2 \(at line 5\)"),
        (MG_WFBP.replace("[1, 2, 300.5, 9]", "[1, 2, nan, 9]"), r"backward time: got nan.* \(at line 4\)"),
        (json.dumps(kineto())[:-40], "not a PyTorch profiler trace"),
        ({"traceEvents": []}, "no torch::autograd::AccumulateGrad in it"),
        ({"traceEvents": [gradient(1, [])] * 3 + [event("x", 1, -5)]}, r"dur -5.0.* \(at \$\.traceEvents\[3\]\)"),
        ({"traceEvents": [gradient(1, [1]), event("x", 1e308, 1)]}, r"got ts 1e\+308, .* \(at \$\.traceEvents\[1\]\)"),
        ({"traceEvents": [event(ACCUMULATE, 1, 2)]}, "record_shapes=True"),
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
    assert "3 tensors, 136 B, 2 layers; forward 25.00 us, backward 40.00 us, update 18.00 us, uncovered 917.00 us" in said
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
    assert profile.source.endswith("23% of a step of 150.39 ms is uncovered time")
    assert profile.compute_ns == pytest.approx(150_390_000, rel=0.002)  # a sum of medians


@recorded
def test_the_recorded_chakra_trace_has_three_iterations_of_resnet_50_and_15_all_reduces():
    sizes, collectives, _ = chakra.read_sizes(load(DATA / "traces" / "resnet-2gpu-chakra-et.json.gz"), "resnet")
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
