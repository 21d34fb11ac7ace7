"""Several models attached at a time: they may share an optimizer, and no parameters."""

from __future__ import annotations

import pytest

from tests.live import several

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("use", several.USES)
def test_one_optimizer_over_two_models_gives_the_bits_of_ddp(two_ranks, use, verify):
    for differs, deferred in two_ranks.run("tests.live.several:one_optimizer", use=use, verify=verify):
        assert differs == []
        assert deferred > 0


def test_a_model_that_shares_a_part_with_an_attached_one_is_refused_by_name(two_ranks):
    for attached, wrapped in two_ranks.run("tests.live.several:a_shared_part"):
        assert attached.startswith("0.weight is also 0.weight of a Sequential that gradlane is attached to")
        assert wrapped.startswith("the model shares 0.weight with a Sequential that gradlane is attached to")


@pytest.mark.parametrize("how", ["at once", "late", "frozen, wrapped again"])
def test_wrapped_models_that_share_a_part_stay_torchs_and_one_line_for_each_says_why(two_ranks, how):
    outcomes = two_ranks.run("tests.live.several:a_shared_part_wrapped", how=how)
    assert [differs for differs, _ in outcomes] == [[], []]
    assert len([line for line in outcomes[0][1] if "two wrapped models share 0.weight" in line]) == 2


def test_a_part_that_two_models_share_and_that_was_frozen_when_they_were_wrapped_is_summed_for_neither(two_ranks):
    outcomes = two_ranks.run("tests.live.several:a_shared_part_wrapped", how="frozen")
    assert [differs for differs, _ in outcomes] == [[], []]
    assert [line for line in outcomes[0][1] if "share" in line] == []
    assert len([line for line in outcomes[0][1] if "0.weight was frozen when the model was wrapped" in line]) == 2


def test_what_a_script_waits_for_another_models_sums_is_no_computing(two_ranks):
    for computes_s, waits_s in two_ranks.run("tests.live.several:computes_beside_another", delay_s=0.5):
        assert computes_s < 0.5
        assert waits_s > 0.75  # a little less than the second for which sums are on their way


@pytest.mark.parametrize(("backend", "measurements"), [("all-reduce", 1), ("server", 1), (None, 2)])
def test_a_second_session_of_the_same_ranks_goes_on_with_the_networks_of_the_first(two_ranks, backend, measurements):
    for measured, is_same, differs in two_ranks.run("tests.live.several:a_second_session", backend=backend, meanwhile=""):
        assert (measured, is_same, differs) == (measurements, True, [])


@pytest.mark.parametrize("meanwhile", ["too long", "halves"])
def test_all_ranks_measure_again_where_one_knows_the_network_no_more_or_halves_travel(two_ranks, meanwhile):
    for measured, _, differs in two_ranks.run("tests.live.several:a_second_session", backend="all-reduce", meanwhile=meanwhile):
        assert (measured, differs) == (2, [])
