"""Generated training loops give under gradlane what they give under DDP, or a typed error.

`python -m tests.live.programs` tries any number of others.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from tests.live.programs.kept import KEPT, WHY_OPEN, WITHOUT
from tests.live.programs.program import Program, matches
from tests.live.programs.runner import Runner
from tests.live.programs.strategies import GENERATED, programs

pytestmark = pytest.mark.matrix

EXAMPLES = {"cpu": 40, "late": 20}
"""By device; "late" is the CPU, taken for one."""
SERVED_EXAMPLES = 15


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def device_runner() -> Iterator[Runner]:
    with Runner("late") as runner:
        yield runner


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(reason=WHY_OPEN[name], strict=True)] if name in WHY_OPEN else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in KEPT])
def test_a_program_that_failed_once_is_equal_or_refused(runner, name):
    outcome = runner.run(KEPT[name])
    assert outcome.kind in ("equal", "refused"), f"{outcome.kind} {outcome.about}\n{outcome.trace}"


def test_a_transform_of_functorch_meets_no_copy_of_a_device(device_runner):
    steps = (("backward",), ("backward",), ("zero_grad", "backward", "step", "functorch grad"))
    outcome = device_runner.run(Program(steps, optimizer="sgd"))
    assert outcome.kind == "equal", f"{outcome.kind} {outcome.about}\n{outcome.trace}"


@pytest.mark.parametrize("device", EXAMPLES)
def test_generated_programs_are_equal_or_refused(runner, device_runner, device):
    kinds, deferring = [], 0
    examples = EXAMPLES[device]

    @settings(GENERATED, max_examples=examples)
    @given(programs(WITHOUT))
    def each(program: Program) -> None:
        nonlocal deferring
        outcome = (runner if device == "cpu" else device_runner).run(program)
        kinds.append(outcome.kind)
        deferring += any(outcome.deferred)
        assert not outcome.bad, (
            f"{outcome.kind} {outcome.about}\n{outcome.trace}"
            f"python -m tests.live.programs --device {device} --program '{program.json()}'"
        )

    each()
    assert kinds.count("equal") > examples / 2  # programs that DDP or gradlane refuses say nothing
    assert deferring > examples / 4


def test_generated_programs_whose_update_is_on_the_servers_are_equal_or_refused(runner):
    outcomes = []

    @settings(GENERATED, max_examples=SERVED_EXAMPLES)
    @given(programs(WITHOUT, served=True))
    def each(program: Program) -> None:
        outcome = runner.run(program)
        outcomes.append(outcome)
        assert not outcome.bad, (
            f"{outcome.kind} {outcome.about}\n{outcome.trace}python -m tests.live.programs --program '{program.json()}'"
        )

    each()
    assert sum(outcome.kind == "equal" for outcome in outcomes) > SERVED_EXAMPLES / 2
    assert sum(any(outcome.deferred) for outcome in outcomes) > SERVED_EXAMPLES / 2


def test_programs_are_read_back_from_their_json():
    for program in KEPT.values():
        assert Program.from_json(program.json()) == program


def test_a_kind_that_is_taken_out_is_gone():
    for program in KEPT.values():
        for kind, smaller in program.kinds().items():
            assert kind not in smaller.kinds()


def test_what_is_open_is_kept():
    assert WHY_OPEN.keys() <= KEPT.keys()


def test_what_is_left_out_is_matched_by_its_words():
    assert matches("scale mul all", "scale")
    assert matches("scale mul all", "scale mul")
    assert matches("backward no_sync", "no_sync")
    assert not matches("scale mul all", "scale data")
