from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path

import msgspec
import pytest

from gradlane import policies, zoo
from gradlane.cli import reports
from gradlane.cli.compare import _FIRST, _arms
from gradlane.cli.inputs.knobs import parse_knobs
from gradlane.core import files
from gradlane.core.checks import check_plan
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.stock_ddp import ddp_kwargs, why_not_ddp
from tests.commands import command_line, invoke

MIB = 2**20

# backward 100 ms; two large tensors in the last layer, a small urgent one in the first
PROFILE = Profile(
    "three",
    "none",
    (
        TensorProfile(TensorSpec("out.weight", 4 * MIB), 20_000_000, 1),
        TensorProfile(TensorSpec("out.bias", 4096), 20_000_000, 1),
        TensorProfile(TensorSpec("in.weight", 2 * MIB), 100_000_000, 0),
    ),
    (Layer("in", 20_000_000, 1_000_000), Layer("out", 30_000_000)),
    100_000_000,
)
NETWORK = Network.line(4, 1_000_000, 100_000_000)


# -- gradlane compare ---------------------------------------------------------------------------------------


def test_compare_trains_auto_and_the_five_papers_each_over_what_carries_it():
    names = [arm.name for arm in _arms(None, _FIRST, 0)]
    assert names == ["auto", "mg-wfbp", "bytescheduler", "prophet", "geryon", "mercury@server"]


def test_compare_all_trains_every_policy_once():
    assert sorted(arm.policy for arm in _arms(None, None, 0)) == sorted(["auto", *catalog.names()])
    assert {arm.backend for arm in _arms(["server"], None, 0)} == {"server"}


def test_compare_trains_a_policy_with_several_values_of_a_knob_over_each_backend():
    arms = _arms(["all-reduce", "server"], ["p3", "p3:slice_bytes=1MiB", "auto"], 0)
    assert [(arm.policy, arm.knobs) for arm in arms] == 2 * [("p3", {}), ("p3", {"slice_bytes": 2**20}), ("auto", {})]
    assert [arm.name for arm in arms[:2]] == ["p3", "p3:slice_bytes=1MiB"]
    assert [arm.name for arm in arms[3:5]] == ["p3@server", "p3:slice_bytes=1MiB@server"]
    assert len(_arms(None, ["p3", "p3:slice_bytes=1MiB"], 0)) == 2


@pytest.fixture
def inputs(tmp_path):
    files.write(tmp_path / "profile.json", PROFILE)
    files.write(tmp_path / "network.json", NETWORK)
    return [str(tmp_path / "profile.json"), str(tmp_path / "network.json")]


# -- gradlane policies --------------------------------------------------------------------------------------


def test_policies_lists_every_policy_with_its_paper_and_marks_the_default():
    text = invoke("policies")
    for name in policies.names():
        assert name in text
    assert text.count("*") == 3  # all-reduce's default, servers', and what the star means
    assert "MG-WFBP (TPDS '21) Algorithm 1" in text
    assert "partition_bytes=1048576" in text


def test_knobs_are_sizes_numbers_shares_and_words():
    given = ["slice_bytes=1MiB", "threshold_percent=25", "share=0.1", "categories=coarse"]
    assert parse_knobs(given) == {"slice_bytes": 2**20, "threshold_percent": 25, "share": 0.1, "categories": "coarse"}


def test_policies_as_json_has_the_knobs_with_their_defaults_and_the_backends():
    rows = {row["name"]: row for row in json.loads(invoke("policies", "--json"))}
    assert rows["mercury"]["backends"] == ["server"]
    assert rows["dear"]["backends"] == ["all-reduce", "server"]
    assert list(rows) == list(catalog.names())
    assert rows["bytescheduler"] == {
        "name": "bytescheduler",
        "default": [],
        "paper": "ByteScheduler (SOSP '19) Algorithm 1",
        "differs": "credit equal to the slice suffices, and over servers comes back without an acknowledgement (knob until); "
        "over all-reduce the plan's order by default, the paper's with rank 0 deciding; "
        "only PyTorch crosses the barrier",
        "knobs": {"partition_bytes": 1048576, "credit_bytes": 4194304, "pulls": "priority", "until": "sent"},
        "backends": ["all-reduce", "server"],
    }
    defaults = {name: row["default"] for name, row in rows.items() if row["default"]}
    assert defaults == {"blocks": ["all-reduce"], "mercury": ["server"]}


# -- gradlane plan ------------------------------------------------------------------------------------------


def test_with_clipping_owners_are_ranked_too_and_nobody_else_crosses_the_barrier(inputs):
    free, clipped = (
        {row["policy"]: row["iteration_ns"] for row in json.loads(invoke("plan", *inputs, "--json", *more))["policies"]}
        for more in ((), ("--clips",))
    )
    assert set(clipped) == {*free, "owners"}
    assert all(clipped[name] >= free[name] for name in free)
    assert clipped["ddp"] == free["ddp"]
    said = invoke("plan", *inputs, "--clips")
    assert "clips gradients by their norm" in said
    slow = ("plan", "resnet50", "--rate", "1gbit", "--workers", "2", "--policy", "blocks", "--json")
    free, clipped = (json.loads(invoke(*slow, *more))["policies"][0]["iteration_ns"] for more in ((), ("--clips",)))
    assert clipped > 1.1 * free


def test_plan_ranks_all_policies_against_ddp_and_the_bound(inputs):
    report = json.loads(invoke("plan", *inputs, "--json"))
    assert (report["model"], report["workers"], report["oracle_ns"]) == ("three", 4, 151_000_000)
    # the first layer's 2 MiB are ready at 100 and cost 21.97 ms; the whole forward pass follows
    assert report["bound_ns"] == 172_971_520
    assert {row["policy"] for row in report["policies"]} == set(policies.names("all-reduce")) - {"owners"}
    times = [row["iteration_ns"] for row in report["policies"]]
    assert times == sorted(times)
    assert report["chosen"] == report["policies"][0]["policy"]
    by_name = {row["policy"]: row for row in report["policies"]}
    # forward 50, gradients last ready at 100, 2 MiB then take 1 + 20.97152 ms, update 1
    assert by_name["wfbp"]["iteration_ns"] == 50_000_000 + 100_000_000 + 21_971_520 + 1_000_000
    assert by_name["wfbp"]["efficiency"] == pytest.approx(151 / 172.97152)
    assert by_name["wfbp"]["above_bound"] == 0.0
    assert by_name["sync-easgd"]["speedup_over_ddp"] == pytest.approx(172.97152 / (151 + 1 + 6.004 * MIB / 10**5), rel=1e-3)
    assert by_name["ddp"]["speedup_over_ddp"] == 1.0


def test_plan_prints_a_table_a_recommendation_and_the_plan(inputs):
    text = invoke("plan", *inputs)
    assert "3 tensors, 6.0 MiB of gradients a step" in text
    assert "all-reduce of 4 workers: a message costs 1.00 ms and travels at 800 Mbit/s" in text
    assert (
        text.index("nothing to gain: ") < text.index("no schedule is faster") < text.index("above bound") < text.index("next: ")
    )
    assert "message 0" not in text
    assert "got auto, which tries plans in a running job" in invoke("plan", *inputs, "--policy", "auto", code=2)
    assert "no schedule is faster than 172.97 ms; computation alone takes 151.00 ms" in text
    assert "less than ddp" in text
    assert "fingerprint" in text


def test_plan_for_one_policy_sets_it_beside_ddp_and_says_by_how_much(inputs):
    text = invoke("plan", *inputs, "--policy", "sync-easgd", "--messages")
    # ddp sends 4 MiB while backward runs, which sync-easgd sends after it: 41.94 ms
    assert "sync-easgd: 214.96 ms an iteration, 41.94 ms (24.2%) more than ddp" in text
    assert "wfbp" not in text
    assert "message 0, priority 0, 6.0 MiB: out.weight .. in.weight (3 slices)" in text


def test_the_plan_that_is_written_has_its_order_fixed_and_fits_the_profile(inputs, tmp_path):
    out = tmp_path / "plan.json"
    assert f"wrote {out}" in invoke("plan", *inputs, "--policy", "tictac", "--out", str(out))
    plan = files.read(out, Plan)
    check_plan(plan, PROFILE.specs)
    assert plan.policy == "tictac"
    # both of the last layer are ready together, the first handed over goes first
    assert plan.sequence == (0, 1, 2)


def test_knobs_take_sizes_as_people_write_them(inputs):
    rows = json.loads(invoke("plan", *inputs, "--policy", "bytescheduler", "--knob", "partition_bytes=512KiB", "--json"))[
        "policies"
    ]
    assert {row["policy"]: row["messages"] for row in rows}["bytescheduler:partition_bytes=512KiB"] == 8 + 1 + 4
    text = invoke("plan", *inputs, "--policy", "blocks", "--knob", "least_bytes=512KiB")
    assert "blocks:least_bytes=512KiB: " in text
    assert invoke("plan", *inputs, "--policy", "blocks:least_bytes=512KiB") == text


def test_one_worker_sends_nothing_and_hides_nothing():
    text = invoke("plan", "vgg16", "--workers", "1", "--rate", "1gbit", "--policy", "p3")
    assert "network  one worker, which sends nothing\n" in text
    assert re.search(r"│ ddp .* │ +- │", text)
    of_server = invoke("plan", "vgg16", "--workers", "1", "--rate", "1gbit", "--policy", "p3", "--servers", "same")
    assert re.search(r"│ ddp .* │ +\d+% │", of_server)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--emit", "ddp-kwargs", "--json"], "--emit: got it with --json, expected one or the other"),
        (["--policy", "fast"], "policy: got 'fast', expected one of wfbp"),
        (["--knob", "slice_bytes=4"], "--knob: got knobs and no policy"),
        (["--policy", "p3", "--knob", "slice_bytes"], "--knob: got 'slice_bytes', expected NAME=VALUE"),
        (["--policy", "p3", "--knob", "slice_bytes=8", "--knob", "slice_bytes=9"], "--knob: got slice_bytes twice"),
        (["--policy", "p3", "--knob", "speed=8"], "--knob: got 'speed', expected slice_bytes"),
        (["--policy", "p3", "--knob", "slice_bytes=x"], "slice_bytes: got 'x', expected an integer from 8"),
        (["--policy", "p3", "--knob", "slice_bytes=1"], "slice_bytes: got 1, expected an integer from 8"),
    ],
)
def test_what_plan_cannot_use_ends_with_code_2_and_a_reason(inputs, arguments, fault):
    assert fault in invoke("plan", *inputs, *arguments, code=2)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"format": "gradlane.profile", "version": 1, "body": {}}'])
def test_a_file_that_cannot_be_read_is_named(inputs, tmp_path, text):
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    for command in (["plan", bad], ["plan", inputs[0], bad], ["simulate", bad], ["lab", "--file", bad, "true"]):
        assert f"gradlane: {bad}: " in invoke(*command, code=2)


def test_files_in_the_wrong_order_are_refused(inputs):
    assert "got a 'gradlane.network', expected a 'gradlane.profile' (at $.format)" in invoke("plan", *inputs[::-1], code=2)


# -- --emit ddp-kwargs --------------------------------------------------------------------------------------


def closes(caps: list[float], sizes: list[int]) -> list[list[int]]:
    """What DDP makes of the caps: a bucket closes when its size reaches its cap."""
    buckets: list[list[int]] = [[]]
    for tensor in range(len(sizes)):
        buckets[-1].append(tensor)
        if sum(sizes[t] for t in buckets[-1]) >= int(caps[min(len(buckets), len(caps)) - 1] * MIB):
            buckets.append([])
    return [bucket for bucket in buckets if bucket]


def test_the_caps_make_ddp_close_its_buckets_where_the_groups_end(inputs):
    text = invoke("plan", *inputs, "--policy", "mg-wfbp", "--emit", "ddp-kwargs")
    kwargs = eval(text)
    assert kwargs == {"bucket_cap_mb_list": [(4 * MIB + 4096 - 2048) / MIB, 1.0]}
    assert closes(kwargs["bucket_cap_mb_list"], [tensor.spec.size_bytes for tensor in PROFILE.tensors]) == [[0, 1], [2]]


def test_without_a_policy_the_best_that_ddp_can_carry_out_is_emitted(inputs):
    text = invoke("plan", *inputs, "--emit", "ddp-kwargs")
    assert text.startswith(("# mg-wfbp", "# wfbp", "# ddp", "# sync-easgd"))
    assert set(eval(text)) == {"bucket_cap_mb_list"}


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan("p", "m", (TensorSpec("a", 4),), (Message((Slice(0, 0, 4),)),), crosses_barrier=True), "crosses the barrier"),
        (
            Plan("p", "m", (TensorSpec("a", 8),), (Message((Slice(0, 0, 4),)), Message((Slice(0, 4, 4),)))),
            "carries a part of a",
        ),
        (
            Plan("p", "m", (TensorSpec("a", 4), TensorSpec("b", 4)), (Message((Slice(1, 0, 4),)), Message((Slice(0, 0, 4),)))),
            "message 0, number 0 to start, is not next in readiness order",
        ),
        (
            Plan(
                "p",
                "m",
                (TensorSpec("a", 4), TensorSpec("b", 4)),
                (Message((Slice(0, 0, 4),)), Message((Slice(1, 0, 4),))),
                sequence=(1, 0),
            ),
            "message 1, number 0 to start, is not next in readiness order",
        ),
        (
            Plan(
                "p",
                "m",
                (TensorSpec("a", 4), TensorSpec("b", 4, "float16")),
                (Message((Slice(0, 0, 4),)), Message((Slice(1, 0, 4),))),
            ),
            "it has float16 and float32",
        ),
        (Plan("p", "m", (TensorSpec("a", 4),), (Message((Slice(0, 0, 4),), hold_until=0),)), "message 0 is held back"),
        (Plan("p", "m", (TensorSpec("a", 4),), (Message((Slice(0, 0, 4),)),), (Lane(4),)), "it has a window"),
    ],
)
def test_what_stock_ddp_cannot_carry_out_is_refused_with_the_reason(plan, reason):
    assert reason in why_not_ddp(plan)
    with pytest.raises(InputError, match=f"stock DDP cannot carry out this p plan: .*{reason}"):
        ddp_kwargs(plan)


def test_emitting_for_a_crossing_policy_ends_with_code_2(inputs):
    assert "cannot carry out this p3 plan: it crosses the barrier" in invoke(
        "plan", *inputs, "--policy", "p3", "--emit", "ddp-kwargs", code=2
    )


# -- what is imported ---------------------------------------------------------------------------------------


def test_planning_and_reporting_import_no_torch():
    modules = (
        "gradlane, gradlane.cli.plan, gradlane.cli.policies, gradlane.planning.fit, gradlane.report.perfetto, "
        "gradlane.report.table"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FULL = Path("/dev/full")  # a device that takes nothing


@pytest.mark.parametrize("arguments", [("zoo",), ("simulate", "alexnet", "--json"), ("--help",), ("launch", "--help")])
def test_where_stdout_takes_nothing_a_command_says_so_and_fails(arguments: tuple[str, ...]) -> None:
    with FULL.open("wb") as full:
        ran = subprocess.run(command_line(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert ran.stderr.startswith("gradlane: stdout: got no space for it (No space left on device)")
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_letter_that_stdout_cannot_encode_is_a_question_mark(more: tuple[str, ...]) -> None:
    command = command_line("zoo", "vgg16", *more)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command, capture_output=True, env=environment, timeout=240, check=True)
    assert b"Mercury" in ran.stdout
    assert not more or json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("simulate", "alexnet"), "--out"),
        (("simulate", "alexnet"), "--report"),
        (("simulate", "alexnet", "--policy", "wfbp"), "--timeline"),
        (("lab",), "--write"),
        (("plan", "alexnet"), "--out"),
        (("zoo", "alexnet"), "--out"),
    ],
)
def test_a_file_that_takes_nothing_is_named_and_stays_what_it_is(
    arguments: tuple[str, ...], option: str, tmp_path: Path
) -> None:
    target = tmp_path / "full"
    target.symlink_to(FULL)
    said = invoke(*arguments, option, target, code=1)
    assert f"gradlane: {target}: got an error while writing it (No space left on device); make room" in said
    assert target.is_char_device()
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("option", ["--out", "--report", "--timeline"])
def test_a_file_on_a_full_disk_stays_what_it_was(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "written"
    target.write_text("as it was")
    write_bytes = Path.write_bytes

    def part(path: Path, data: bytes) -> int:
        write_bytes(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", part)
    assert f"{target}: got an error while writing it" in invoke(
        "simulate", "alexnet", "--policy", "wfbp", option, target, code=1
    )
    assert target.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [target]


def test_a_report_has_a_question_mark_where_its_command_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / os.fsdecode(b"\xff.html")
    words = ["simulate", "alexnet", "--rate", "1gbit", "--workers", "2", "--policy", "ddp", "--report", str(target)]
    monkeypatch.setattr(sys, "argv", ["gradlane", *words])
    invoke(*words)
    assert target.exists()
    assert reports.command_line().endswith("?.html'")


def test_a_folder_of_a_comparison_that_is_not_utf_8_is_refused_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"\xff")
    said = invoke("compare", "--loopback", "--out", out, code=2)
    assert said == f"gradlane: --out: got {str(out)!r}, whose name is not UTF-8, expected one that is; give another\n"
    assert not out.exists()


@pytest.mark.parametrize("options", ["--loopback --hosts 900000", "--hosts 900000", "vgg16 --hosts 2,900000"])
def test_a_comparison_that_this_machine_cannot_run_leaves_what_an_earlier_one_left(tmp_path: Path, options: str) -> None:
    kept = [tmp_path / name for name in ("comparison.json", "sweep.json", "plan-torch-ddp-rank0.json")]
    for path in kept:
        path.write_text("of an earlier run")
    assert "expected" in invoke("compare", *options.split(), "--out", tmp_path, code=2)
    assert all(path.exists() for path in kept)


def test_a_lab_that_is_written_is_named_and_takes_no_command(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    assert invoke("lab", "--hosts", 3, "--write", path) == f"wrote {path}\n"
    assert json.loads(path.read_text())["hosts"] == 3
    said = invoke("lab", "--write", path, "--", "echo", "hello", code=2)
    assert "--write: got it with the command 'echo', expected one or the other" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["net$\\alpha{$", "$", "_hidden", "a < b & c", "$x_1$"])
def test_a_plot_shows_names_as_they_are(name: str, tmp_path: Path) -> None:
    profile = msgspec.structs.replace(zoo.profile("alexnet"), model=name)
    files.write(tmp_path / "profile.json", profile)
    picture = tmp_path / "picture.svg"
    invoke("simulate", tmp_path / "profile.json", "--rate", "1gbit,10gbit", "--policy", "wfbp", "--plot", picture)
    # matplotlib draws letters, and leaves what they say in comments
    drawn = picture.read_text()
    assert name in drawn or escape(name) in drawn


@pytest.mark.slow
def test_a_plot_that_takes_nothing_is_named(tmp_path: Path) -> None:
    target = tmp_path / "full.svg"
    target.symlink_to(FULL)
    said = invoke("simulate", "alexnet", "--rate", "1gbit,10gbit", "--plot", target, code=1)
    assert f"{target}: got an error while writing it (No space left on device)" in said
