"""bench/notes/gpu.md of small files, and the tables of `python -m bench.device`."""

from __future__ import annotations

import json

from bench.device import page, summary
from bench.device.lines import Lines, read

TESTS = {
    "cards": ["NVIDIA H200"],
    "driver": "580.1",
    "torch": "2.11.0",
    "nccl": True,
    "processors": 16,
    "stand_in": False,
    "checks": [
        {
            "family": "amp",
            "name": "autocast",
            "carrier": "server",
            "group": "gloo",
            "ranks": 2,
            "outcome": "passed",
            "seconds": 1,
            "reason": "",
        },
        {
            "family": "amp",
            "name": "scaler",
            "carrier": "server",
            "group": "gloo",
            "ranks": 2,
            "outcome": "failed",
            "seconds": 1,
            "reason": "rank 0: bits\nmore",
        },
        {
            "family": "faults",
            "name": "killed",
            "carrier": "all-reduce",
            "group": "nccl",
            "ranks": 1,
            "outcome": "skipped",
            "seconds": 0,
            "reason": "needs a second rank",
        },
    ],
}
LINES = [
    {
        "kind": "model",
        "model": "gpt2",
        "tensors": 148,
        "megabytes": 497.8,
        "batch": 9,
        "dtype": "float32",
        "all_reduce_ms": 400.0,
        "computing_ms": 390.0,
    },
    {
        "kind": "warm-up",
        "model": "gpt2",
        "arm": "auto@any",
        "step_ms": [500.0] * 26,
        "settled": True,
        "policy": "blocks",
        "backend": "all-reduce",
    },
    {"kind": "turn", "model": "gpt2", "arm": "ddp", "turn": 0, "step_ms": [800.0, 810.0], "deferred": 0, "batches": 0},
    {
        "kind": "turn",
        "model": "gpt2",
        "arm": "mercury@server",
        "turn": 0,
        "step_ms": [400.0, 405.0],
        "deferred": 148,
        "batches": 12,
    },
    {
        "kind": "turn",
        "model": "gpt2",
        "arm": "mercury@server",
        "turn": 1,
        "step_ms": [900.0, 900.0],
        "deferred": 148,
        "batches": 12,
    },
    {"kind": "losses", "model": "gpt2", "arm": "mercury@server", "steps": 12, "equal": True, "most_apart": 0.0, "last": 10.8},
    {"kind": "left out", "model": "gpt2", "arm": "ddp", "turn": 1, "reason": "time was up"},
    {
        "kind": "cost",
        "group": "gloo",
        "ranks": 2,
        "carrier": "server",
        "ddp_tensor_us": 10.0,
        "tensor_us": 5.0,
        "ddp_message_us": 90.0,
        "message_us": 21.25,
    },
    {"kind": "bus", "tensor": "1 MiB", "staged down": 40.0, "plain down": 50.0, "staged up": 41.0, "plain up": 51.0},
    {
        "kind": "profile",
        "model": "resnet50",
        "card": "NVIDIA H200",
        "batch": 32,
        "of": "Kineto",
        "forward_ms": 5.0,
        "backward_ms": 10.0,
        "step_ms": 16.0,
        "forward_error": 0.02,
        "backward_error": -0.01,
        "ready_error": 0.015,
        "compared": 161,
    },
    {
        "kind": "profile",
        "model": "resnet50",
        "card": "h200",
        "batch": 32,
        "of": "zoo",
        "forward_ms": 4.0,
        "backward_ms": 8.0,
        "step_ms": 13.0,
    },
    {"kind": "error", "part": "costs over nccl", "text": "Traceback\n  File\nRuntimeError: no NCCL"},
]
BENCH = {
    **{key: TESTS[key] for key in ("cards", "driver", "torch", "processors")},
    "rate": "10gbit",
    "dry": False,
    "lines": LINES,
}


def test_the_page_says_what_was_run_on_which_card_and_what_was_not():
    text = page.page(TESTS, BENCH)
    assert text.count("NVIDIA H200; driver 580.1, PyTorch 2.11.0, 16 cores") == 2
    assert "| amp | server | 2, gloo | 1 | 1 | 0 |" in text
    assert "| faults | all-reduce | 1, nccl | 0 | 0 | 1 |" in text
    assert "- scaler (server over gloo, 2 ranks): rank 0: bits\n" in text
    assert "- 1 checks (faults over nccl): needs a second rank" in text
    assert "dry run" not in text
    assert "stood in" not in text


def test_the_page_has_a_table_for_each_measurement():
    text = page.page(TESTS, BENCH)
    # the ratio is of the turn that both had
    assert "| gpt2 | mercury@server | 652 | 400..900 | 0.500 (0.500..0.500) | 148 | 12 | equal, 12 steps |" in text
    assert "| gpt2 | torch DDP | 805 | 800..810 |  |  |  |  |" in text
    assert "- gpt2: auto settled on blocks over all-reduce after 26 steps in 13.0 s, counted apart" in text
    assert "| 2 | server | 10.0 | 5.0 | 90.0 | 21.2 |" in text
    assert "| 1 MiB | 40.0 | 50.0 | 41.0 | 51.0 |" in text
    assert "session's forward +2.0%, backward -1.0%, ready 1.5% in the median of 161" in text
    assert "| resnet50 | zoo | h200 | 32 | 4.0 | 8.0 | 13.0 |  |" in text
    assert "- gpt2, ddp, turn 1: time was up\n- costs over nccl: failed: RuntimeError: no NCCL" in text


def test_losses_that_differ_are_told():
    apart = {**LINES[5], "equal": False, "most_apart": 0.02}
    (row,) = [row for row in summary.training([*LINES[:5], apart]) if row[1] == "mercury@server"]
    assert row[-1] == "apart by 0.02, 12 steps"


def test_without_files_the_page_says_that_nothing_was_run():
    text = page.page(None, None)
    assert "`make test-device` was not run" in text
    assert "`python -m bench.device` was not run" in text


def test_a_dry_run_and_the_stand_in_are_named():
    text = page.page({**TESTS, "cards": [], "driver": "", "stand_in": True}, {**BENCH, "dry": True})
    assert "no CUDA device; driver none" in text
    assert "The CPU stood in for a device: no GPU was used." in text
    assert "A dry run on the CPU" in text


def test_what_is_written_by_hand_stays(tmp_path):
    tests, bench, to = tmp_path / "tests.json", tmp_path / "bench.json", tmp_path / "gpu.md"
    page.write(tests, bench, to)
    first = to.read_text()
    assert page._PLACE in first
    to.write_text(first.replace(page._PLACE, "## Losses\n\nNone | all."))
    tests.write_text(json.dumps(TESTS))
    bench.write_text(json.dumps(BENCH))
    for _ in range(2):
        page.write(tests, bench, to)
        text = to.read_text()
        assert text.count("## Losses\n\nNone | all.") == 1
        assert "(to be written)" not in text
        assert text == page.page(TESTS, BENCH, text)


def test_lines_outlive_a_process_that_ends_within_one(tmp_path):
    path = tmp_path / "part.jsonl"
    assert read(path) == []
    Lines(path).add("bus", tensor="1 MiB")
    with path.open("a") as file:
        file.write('{"kind": "bu')
    assert read(path) == [{"kind": "bus", "tensor": "1 MiB"}]
    Lines(None).add("bus")


def test_a_table_of_nothing_is_its_titles():
    assert len(summary.training([])) == len(summary.costs([])) == len(summary.bus([])) == len(summary.profiles([])) == 1
    assert summary.everything({"lines": []}) == ""
