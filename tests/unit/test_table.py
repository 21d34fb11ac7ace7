from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from gradlane.compare.records import Comparison, Result
from gradlane.core.records.speedup import Speedup
from gradlane.errors import FormatError, InputError
from gradlane.report.table import render
from gradlane.report.terminal import print_table
from tests.commands import invoke

MS = 1_000_000
COMPARISON = Comparison(
    command="gradlane compare --hosts 2",
    machine="2 cores, emulated hosts",
    hosts=2,
    link_bits_per_second=500_000_000,
    model="mlp",
    parameter_bytes=4 * 2**20,
    turns=3,
    bound=Speedup(1.8, 1.7, 1.9, 3),
    bound_text="computation alone",
    results=(
        Result("blocks", (50 * MS, 60 * MS, 40 * MS), Speedup(2.0, 1.9, 2.25, 3), True, 0.75, 0.12345, True),
        Result("torch-ddp", (100 * MS, 110 * MS, 90 * MS), Speedup(1.0, 1.0, 1.0, 3), False, None, 0.12345, None),
        Result("p3", (), note="rank 1 stopped: [red]out of memory"),
        Result("wfbp", (200 * MS,), Speedup(0.5, 0.5, 0.5, 3), False, 0.0, 0.5, False),
    ),
    remarks=("! blocks is above the bound",),
    loss_step=19,
)


def printed(comparison: Comparison, width: int = 200) -> list[str]:
    text = io.StringIO()
    render(comparison, Console(width=width, file=text))
    return [" ".join(line.replace("│", " ").split()) for line in text.getvalue().splitlines()]


@pytest.mark.parametrize("width", [20, 80])
def test_a_table_wider_than_the_terminal_is_not_cut(width):
    table = Table("name", *(f"column {number}" for number in range(12)))
    table.add_row("mercury-no-preemption", *(f"1{number} Gbit/s" for number in range(12)))
    text = io.StringIO()
    print_table(table, Console(file=text, width=width, force_terminal=True))
    assert "…" not in text.getvalue()
    row = next(line for line in text.getvalue().splitlines() if "mercury-no-preemption" in line)
    assert all(f"1{number} Gbit/s" in row for number in range(12))


@pytest.mark.parametrize("columns", [80, None], ids=["80 columns", "a pipe"])
@pytest.mark.parametrize(
    "command",
    [
        "policies",
        "zoo vgg16",
        "plan resnet18 --policy mercury-no-preemption --servers same",
        "simulate resnet18 alexnet --rate 1gbit,100gbit --workers 512,1024 --policy mg-wfbp-exact --policy ddp",
        "whatif workers alexnet --policy wfbp",
    ],
)
def test_no_cell_is_cut_and_nothing_is_coloured(command, columns):
    text = invoke(*command.split(), columns=columns)
    assert "…" not in text
    assert "\x1b" not in text
    if columns is None and command == "zoo vgg16":
        assert text.splitlines()[0].endswith("update 5.97 ms")


def test_without_ddp_there_is_no_ratio():
    alone = Comparison("c", "m", 1, None, "mlp", 4, 1, None, "", (Result("blocks", (5,)),))
    assert "blocks 0.00 - - - - -" in printed(alone)


def test_the_table_has_ddp_first_the_best_marked_and_the_bound_below():
    lines = printed(COMPARISON)
    assert lines[:2] == [
        "With blocks, training is 2.00 times as fast as under torch DDP (1.90 to 2.25); "
        "no schedule can exceed 1.80 times here.",
        "mlp, 4.0 MiB of parameters, 2 hosts, 500 Mbit/s links",
    ]
    rows = [line for line in lines if line.split(" ")[0] in ("torch-ddp", "blocks", "p3", "wfbp")]
    assert rows == [
        "torch-ddp 100.0 1.00 1.00..1.00 - 0.1235 -",
        "blocks 50.0 2.00 !* 1.90..2.25 75% 0.1235 yes",
        "p3 - - - - - - rank 1 stopped: [red]out of memory",
        "wfbp 200.0 0.50 0.50..0.50 0% 0.5000 no",
    ]
    assert lines[-4:] == [
        "bound: 1.80 x DDP (1.70..1.90), computation alone",
        "! blocks is above the bound",
        "on 2 cores, emulated hosts",
        "x DDP: torch DDP's step over this one's, the median of 3 turns; * the best; = DDP: parameters and buffers at the end "
        "equal DDP's bit for bit; loss: after 19 steps of each",
    ]


def test_the_row_of_the_answer_is_the_bold_one_and_the_fastest_has_the_star():
    auto = Result("auto", (80 * MS,), Speedup(1.25, 1.2, 1.3, 3), False, 0.5, 0.12345, True)
    text = io.StringIO()
    comparison = msgspec.structs.replace(COMPARISON, results=(*COMPARISON.results, auto))
    render(comparison, Console(width=200, file=text, force_terminal=True, color_system="standard"))
    rows = [line for line in text.getvalue().splitlines() if "1.25" in line or "2.00" in line][1:]
    assert [("auto" in row, "\x1b[1;32m" in row, "*" in row) for row in rows] == [(False, False, True), (True, True, False)]


def test_a_comparison_reads_back_equal():
    assert Comparison.from_json(COMPARISON.to_json()) == COMPARISON


def test_a_loss_that_is_no_number_is_written_as_null_and_read_as_none():
    result = Result("torch-ddp", (5,), Speedup(1.0, 1.0, 1.0, 1), loss=float("nan"))
    read = Comparison.from_json(Comparison("c", "m", 1, None, "mlp", 4, 1, None, "", (result,)).to_json())
    assert read.results[0].loss is None
    assert "torch-ddp 0.00 1.00 * 1.00..1.00 - - -" in printed(read)
    assert "bound: unknown" in printed(read)


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        (["format"], "gradlane.plan", "got 'gradlane.plan' version 2, expected gradlane.comparison version 2"),
        (["version"], 1, "got 'gradlane.comparison' version 1"),
        (["extra"], 1, "got the unknown field 'extra'"),
        (["body", "hosts"], 0, "hosts: got 0"),
        (["body", "results", 0, "step_ns"], [1, -1], r"step_ns\[1\]: got -1"),
        (["body", "turns"], 0, "turns: got 0"),
        (["body", "bound", "ratio"], 2.0, "ratio: got 2.0, expected a number from low to high"),
        (["body", "results", 0, "hidden"], 1.1, "hidden: got 1.1"),
        (["body", "results", 0, "policy"], "torch-ddp", "expected each policy once"),
    ],
)
def test_a_bad_comparison_file_is_refused(place, value, fault):
    tree = node = json.loads(COMPARISON.to_json())
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    with pytest.raises(FormatError, match=fault):
        Comparison.from_json(json.dumps(tree).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"\x80", b"NaN", b"[]"])
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(FormatError, match=r"got no JSON|got a value of type"):
        Comparison.from_json(data)


def test_a_step_of_no_length_is_refused():
    with pytest.raises(InputError, match=r"step_ns\[0\]: got 0"):
        Result("torch-ddp", (0,))
