"""What `python -m tests.device` chooses, judges and keeps, without a device and without ranks."""

from __future__ import annotations

import json

import pytest

from tests.device.catalog import FAMILIES, FEW_LOOPS, LOOPS, Check, checks, is_wanted, why_not
from tests.device.deadline import Deadline
from tests.device.machine import NO_DEVICE, STAND_IN, Machine, Setup, setups
from tests.device.results import Results, Row, table
from tests.device.runner import judge

GLOO = Setup("gloo", 2)


def machine(cards: int, nccl: bool = True, compiles: bool = True) -> Machine:
    return Machine(("A card",) * cards, "1.0", "2.11", nccl, 16, compiles)


@pytest.mark.parametrize(
    ("cards", "nccl", "expected"),
    [
        (1, True, [("gloo", 2), ("nccl", 1)]),
        (1, False, [("gloo", 2)]),
        (4, True, [("gloo", 2), ("nccl", 4)]),
        (0, False, [("gloo", 2), ("nccl", 1)]),  # what would be run where there is one
    ],
)
def test_ranks_are_chosen_by_what_there_is(cards, nccl, expected):
    assert [(setup.group, setup.ranks) for setup in setups(machine(cards, nccl))] == expected


def test_each_carrier_is_tried_where_its_ranks_can_be_started():
    carriers = {setup.group: {check.carrier for check in checks(setup)} for setup in setups(machine(1))}
    assert carriers == {"gloo": {"all-reduce", "server"}, "nccl": {"all-reduce"}}


@pytest.mark.parametrize("setup", [*setups(machine(1)), *setups(machine(2)), STAND_IN], ids=lambda setup: setup.title)
def test_checks_of_one_set_of_ranks_have_names_of_their_own(setup):
    found = list(checks(setup))
    assert len({(check.family, check.name, check.carrier) for check in found}) == len(found)
    assert {check.family for check in found} == set(FAMILIES)


def reasons(setup: Setup, there: Machine) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for check in checks(setup):
        found.setdefault(check.family, set()).add(why_not(check, there))
    return found


def test_without_a_device_every_check_has_the_same_reason():
    assert all(found == {NO_DEVICE} for setup in setups(machine(0)) for found in reasons(setup, machine(0)).values())


def test_what_a_single_device_cannot_do_is_left_out_with_its_reason():
    over_gloo, over_nccl = (reasons(setup, machine(1)) for setup in setups(machine(1)))
    assert {family for family, found in over_gloo.items() if found != {""}} == {"synchronisations"}
    assert {family for family, found in over_nccl.items() if "" not in found} == {"faults"}
    assert over_nccl["synchronisations"] == {""}
    of_four = reasons(setups(machine(4))[1], machine(4))
    assert of_four["faults"] == {""}


def test_blocks_are_compiled_where_there_is_a_compiler():
    (reason,) = reasons(GLOO, machine(1, compiles=False))["compiled"]
    assert "triton" in reason


def test_the_stand_in_runs_what_needs_no_gpu():
    families = {family for family, found in reasons(STAND_IN, machine(0)).items() if "" in found}
    assert families == set(FAMILIES) - {"graphs", "side streams", "synchronisations"}


def test_only_takes_families_and_parts_of_names():
    found = list(checks(GLOO))
    assert {check.family for check in found if is_wanted(check, ["amp"])} == {"amp"}  # and not "clamped"
    assert {check.name for check in found if is_wanted(check, ["rank killed"])} == {"rank killed"}
    assert {check.name for check in found if is_wanted(check, ["foreach"])} == {
        "sgd, foreach",
        "adam, foreach",
        "adamw, foreach",
    }


def test_few_loops_are_some_of_all():
    assert set(FEW_LOOPS) < set(LOOPS)


CHECK = Check("equality", "convolutions", "equality", GLOO, "server")
DIES = Check("faults", "rank killed", "killed", GLOO, "server", dies=True)
ENDED = (False, ("ProcessEnded", "exit code -9", ""))


@pytest.mark.parametrize(
    ("check", "answers", "expected"),
    [
        (CHECK, [(True, None), (True, None)], ("passed", "")),
        (CHECK, [(True, "a remark"), (True, "a remark")], ("passed", "a remark")),
        (CHECK, [(True, None), None], ("failed", "rank 1: no answer within 40 s")),
        (CHECK, [(True, None), ENDED], ("failed", "rank 1: ProcessEnded: exit code -9")),
        (CHECK, [(False, ("Skip", "no compiler", "")), None], ("skipped", "no compiler")),
        (DIES, [(True, "PeerDied after 0.1 s"), ENDED], ("passed", "PeerDied after 0.1 s")),
        (DIES, [ENDED, ENDED], ("failed", "rank 0: ProcessEnded: exit code -9")),
        (DIES, [(True, ""), (False, ("JobError", "lost", "where"))], ("failed", "rank 1: JobError: lost\nwhere")),
    ],
)
def test_answers_are_judged(check, answers, expected):
    assert judge(check, answers, 40) == expected


def test_a_deadline_bounds_what_things_may_take():
    now = [100.0]
    deadline = Deadline(10, lambda: now[0])
    assert (deadline.limit_of(45), deadline.limit_of(3)) == (10, 3)
    now[0] = 108.5
    assert deadline.limit_of(45) == 1.5
    now[0] = 111.0
    assert (deadline.left_s, deadline.limit_of(45)) == (0, 0)


def test_each_row_is_in_the_file_at_once(tmp_path, capsys):
    path = tmp_path / "deep" / "tests.json"
    results = Results(path, machine(1), stand_in=False)
    assert json.loads(path.read_text())["checks"] == []
    rows = [
        Row("amp", "autocast", "server", "gloo", 2, "passed", 1.5),
        Row("faults", "killed", "server", "gloo", 2, "failed", 2.5, "rank 0: nothing\nmore"),
        Row("loops", "step lr", "server", "gloo", 2, "left out", 0.0, "time"),
    ]
    for count, row in enumerate(rows, start=1):
        results.add(row)
        assert len(json.loads(path.read_text())["checks"]) == count
        assert results.all_is_well == (count == 1)
    assert json.loads(path.read_text())["cards"] == ["A card"]
    text = table(results.rows)
    assert "faults, killed, server over gloo x 2:\nrank 0: nothing\nmore" in text
    assert "1 not run: time" in text
    assert len(capsys.readouterr().out.splitlines()) == 3
