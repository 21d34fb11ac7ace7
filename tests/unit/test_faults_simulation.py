"""The control channel under simulated faults (tests/faults): whatever a seed does to the ranks, who must be told is told, in
time, of the rank at fault and of no other."""

from __future__ import annotations

import pytest

from tests.faults.job import HARMLESS, LETHAL, MOMENTS
from tests.faults.mutants import MUTANTS
from tests.faults.runs import report, run

SEEDS, PART = 2000, 250
FOUND_WITHIN = 600  # seeds; the rarest of most needs 405
RARE = {"BlamesWhoLeft": 1949, "KeepsSilenceToItself": 2516}  # the first seeds that find these


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_no_seed_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + PART):
        _, wrong = run(seed)
        assert not wrong, f"{report(seed)}\nagain: python -m tests.faults --from {seed} --seeds 1"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_found(name: str) -> None:
    first = RARE.get(name, 0)
    found = any(run(seed, MUTANTS[name])[1] for seed in range(first, first + FOUND_WITHIN))
    assert found, f"no seed from {first} to {first + FOUND_WITHIN} finds {name}"


def test_a_seed_does_the_same_again() -> None:
    assert report(29) == report(29) != report(30)
    assert report(12, MUTANTS["PassesNothingOn"]) == report(12, MUTANTS["PassesNothingOn"])


def test_seeds_do_every_harm_at_every_moment() -> None:
    harms = [harm for seed in range(300) for harm in run(seed)[0].harms]
    assert {harm.kind for harm in harms} == {*LETHAL, *HARMLESS}
    assert {harm.moment for harm in harms if harm.at is not None} == set(MOMENTS)
