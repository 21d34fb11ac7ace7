"""The update on the servers: in step it is DDP's, otherwise nobody waits for more than the bound says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradlane import policies
from gradlane.transport import UNBOUNDED, Adam, Node, NodeOptions, Sgd
from tests.commands import ROOT, gradlane
from tests.live.cases import differences
from tests.live.ranks import Ranks
from tests.live.test_serving import Served

pytestmark = pytest.mark.matrix

PATIENCE_S = 20
# of Mlp's parameters of 12 to 1,024 bytes some are cut
POLICIES = [
    *(policies.get(name) for name in ("wfbp", "tictac", "mercury-no-preemption")),
    policies.get("p3", slice_bytes=256),
    policies.get("bytescheduler", partition_bytes=256, credit_bytes=512),
    policies.get("bytescheduler", partition_bytes=200, credit_bytes=400, pulls="arrival"),
    policies.get("bytescheduler", partition_bytes=200, credit_bytes=400, until="acknowledged"),
]


def bits_after(rule: Any, first: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Parameters after a step by each gradient, on a server."""
    memory = first.clone()
    with Node(NodeOptions(world=1, servers=1, rank=0, server=0, packet_bytes=512)) as node:
        node.define_updated(0, memory.data_ptr(), memory.numel() * 4, rule, staleness=UNBOUNDED, group=0)
        node.push(0)
        node.wait(0, PATIENCE_S)
        node.set_rule(0, rule)
        for gradient in gradients:
            memory.copy_(gradient)
            node.push(0)
            node.wait(0, PATIENCE_S)
    return memory


def torchs(optimizer: Any, first: torch.Tensor, gradients: list[torch.Tensor], **numbers: Any) -> torch.Tensor:
    param = torch.nn.Parameter(first.clone())
    stepping = optimizer([param], **numbers)
    for gradient in gradients:
        param.grad = gradient.clone()
        stepping.step()
    return param.detach()


def some_numbers() -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(1003, generator=generator), [torch.randn(1003, generator=generator) for _ in range(25)]


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"weight_decay": 0.01},
        {"maximize": True, "weight_decay": 0.01},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ],
    ids=str,
)
def test_sgd_on_a_server_gives_the_bits_of_torch(numbers):
    first, gradients = some_numbers()
    assert torch.equal(
        bits_after(Sgd(lr=0.1, **numbers), first, gradients), torchs(torch.optim.SGD, first, gradients, lr=0.1, **numbers)
    )


@pytest.mark.parametrize("decoupled", [False, True], ids=["Adam", "AdamW"])
@pytest.mark.parametrize(
    "numbers",
    [{"weight_decay": 0.0}, {"weight_decay": 0.05}, {"weight_decay": 0.05, "betas": (0.4, 0.8), "eps": 1e-4, "maximize": True}],
    ids=str,
)
def test_adam_on_a_server_gives_the_numbers_of_torch_but_for_the_rounding_of_roots(decoupled, numbers):
    first, gradients = some_numbers()
    found = bits_after(Adam(lr=0.01, decoupled=decoupled, **numbers), first, gradients)
    expected = torchs(torch.optim.AdamW if decoupled else torch.optim.Adam, first, gradients, lr=0.01, **numbers)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        "step_lr",
        "one_cycle_lr_changes_momentum_too",
        "parameter_groups_with_rates_of_their_own",
        "a_rate_that_is_a_tensor_changed_in_place",
        "two_optimizers",
        "a_closure_that_is_run_once",
        "no_closure_said_aloud",
        "accumulation_with_no_sync",
        "zero_grad_in_place",
        "zero_grad_between_forward_and_backward",
        "hooks_on_gradients",
        "evaluation_between_steps",
        "averages_of_the_model",
        "deep_copies_in_mid_flight",
        "pickles_in_mid_flight",
        "a_branch_left_out_by_all_ranks_in_turns",
        "a_branch_left_out_by_one_rank_only",
        "each_rank_in_a_branch_of_its_own",
        "unused_parts_whose_gradients_are_kept",
        "reentrant_checkpoints",
        "frozen_parameters",
        "parameters_frozen_in_mid_run",
        "a_scripted_part",
        "a_penalty_on_the_parameters",
        "a_backward_pass_that_is_not_the_models",
        "a_channels_last_model",
        "buffers_left_to_each_rank",
        "buffers_and_accumulation",
        "parametrizations",
    ],
)
def test_in_step_a_loop_gives_what_ddp_gives(two_ranks, name):
    """Bit for bit under SGD."""
    assert two_ranks.run("tests.live.served:compare", name=name) == [[], []]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", ["a_branch_left_out_by_one_rank_only", "two_optimizers", "accumulation_with_no_sync"])
def test_under_every_policy_that_sends_each_parameter_by_itself_a_loop_gives_what_ddp_gives(two_ranks, name, policy):
    assert two_ranks.run("tests.live.served:compare", name=name, policy=policy) == [[], []]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_policy_is_carried_out_without_a_bound_too(two_ranks, policy):
    for plan, spans in two_ranks.run("tests.live.served:sent", policy=policy):
        assert plan.policy == policy.name
        assert sorted(message for _, _, message, _, _ in spans) == list(range(len(plan.messages)))
        (lane,) = plan.lanes
        size = [message.size_bytes for message in plan.messages]
        for _, _, message, start, _ in spans if lane.window_bytes is not None else ():
            others = sum(size[other] for _, _, other, begun, ended in spans if other != message and begun <= start < ended)
            assert others == 0 or others + size[message] <= lane.window_bytes
    zero, one = two_ranks.run("tests.live.served:afterwards", staleness=None, steps=5, policy=policy)
    assert differences(zero, one) == []


def test_gradients_that_are_never_zeroed_add_up_as_under_ddp_but_for_rounding(two_ranks):
    found = two_ranks.run("tests.live.served:compare", name="gradients_never_zeroed", roughly=True)
    assert found == [[], []]


@pytest.mark.parametrize("with_adam", [False, True], ids=["momentum", "adam"])
def test_a_job_goes_on_from_a_checkpoint_of_the_servers_state_bit_for_bit(two_ranks, with_adam):
    for options in ({}, {"policy": POLICIES[-1]}):
        assert two_ranks.run("tests.live.served:resumed", with_adam=with_adam, **options) == [[], []]


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_when_all_have_closed_all_have_the_same_with_every_gradient_in_it(two_ranks, staleness):
    zero, one = two_ranks.run("tests.live.served:afterwards", staleness=staleness, steps=7)
    assert differences(zero, one) == []
    updates = {0: 7, 2: 14, None: 21}[staleness]
    assert {int(value) for name, value in zero.items() if name.endswith("/step")} == {updates}


@pytest.mark.parametrize("staleness", [1, 4])
def test_a_rank_is_ahead_by_as_much_as_the_bound_and_never_by_more(two_ranks, staleness):
    steps = 12
    ahead, _ = two_ranks.run("tests.live.served:pace", staleness=staleness, steps=steps)
    assert ahead == [min(step, staleness) for step in range(steps)]


def test_without_a_bound_a_rank_trains_while_another_has_not_begun(two_ranks):
    pytest.importorskip("sklearn")
    (before, after), _ = two_ranks.run("tests.live.served:one_after_the_other", steps=60)
    assert after < before / 2


@pytest.mark.parametrize("staleness", [2, None])
def test_ranks_of_different_speed_learn_the_digits(two_ranks, staleness):
    pytest.importorskip("sklearn")
    for first, last in two_ranks.run("tests.live.served:at_their_own_pace", steps=80, staleness=staleness):
        assert last < first / 2


REFUSALS = {
    "learning rate": "changed between backward() and step()",
    "clipped": "the gradient of layers.0.weight was changed between",
    "dropped": "the gradient of layers.0.weight was changed between",
    "dropped by a hook": "the gradient of layers.1.weight was changed between",
    "two passes": "step() was not called after the last one",
    "two steps": "step() without a backward pass before it",
    "added": "added.weight of shape (3, 2) has a gradient, and servers have no value of it",
    "state": "optimizer.state_dict() while the update is on the servers",
    "load": "optimizer.load_state_dict() while the update is on the servers",
    "state by hand": "optimizer.state is used, or the optimizer is copied, while the update is on the servers",
    "copied": "optimizer.state is used, or the optimizer is copied, while the update is on the servers",
    "fetched too soon": "fetch_optimizer_state() before step()",
    "fetched and changed": "the script changed the optimizer's state of layers.1.weight",
    "hooked by the class": "a step pre-hook runs after gradlane's",
    "data replaced": "the gradient of layers.1.weight was changed between",
    "written": "the script wrote to layers.1.weight",
}


@pytest.mark.parametrize("change", REFUSALS)
def test_what_would_come_too_late_is_refused_and_all_ranks_hear_of_it(two_ranks, change):
    outcomes = two_ranks.run("tests.live.served:refusal", change=change)
    assert {kind for kind, _ in outcomes} <= {"UnsupportedError", "PeerFailed"}
    assert any(kind == "UnsupportedError" for kind, _ in outcomes)
    for _, text in outcomes:
        assert REFUSALS[change] in text
        assert "iteration 0: " in text or change != "dropped by a hook"


ATTACHED = {
    "float64": ("UnsupportedError", "of torch.float64 on cpu"),
    "amsgrad": ("UnsupportedError", "amsgrad=True"),
    "fused": ("UnsupportedError", "fused=True and momentum rounds otherwise"),
    "RMSprop": ("UnsupportedError", "servers do not know RMSprop"),
    "no optimizer": ("InputError", "got none"),
    "half of it": ("UnsupportedError", "layers.2.weight is trained and in no optimizer"),
    "more than it": ("UnsupportedError", "a parameter of shape (3,) that is not the model's"),
    "in two": ("UnsupportedError", "layers.0.weight is in two optimizers"),
    "ignored": ("UnsupportedError", "told to ignore layers.1.weight"),
    "buffers": ("InputError", "broadcast_buffers"),
    "order": ("InputError", "summation_order"),
    "negative": ("InputError", "staleness"),
    "launched policy": ("InputError", "got prophet, which plans from measured times, expected one that plans from sizes"),
    "policy that merges": ("InputError", "got ddp, whose messages are not all parts of one parameter in one lane"),
    "policy with lanes": ("InputError", "got geryon, whose messages are not all parts of one parameter in one lane"),
    "policy of several": ("InputError", "got auto, which tries plans in a running job"),
    "policies differ": ("MismatchError", "ranks disagree on policy"),
    "launched plan": ("InputError", "the launcher gave --plan"),
    "launched backend": ("InputError", "the launcher gave --backend all-reduce"),
    "launched verify": ("InputError", "the launcher gave --verify"),
    "launched check of gradients": ("InputError", "the launcher gave --check-finite"),
    "launched timeline": ("InputError", "the launcher gave --timeline or --report"),
    "launched weight": ("InputError", "the launcher gave --weight"),
    "launched tune": ("InputError", "the launcher gave --tune"),
    "launched progress": ("InputError", "the launcher gave --progress"),
    "launched wire dtype": ("InputError", "the launcher gave --wire-dtype"),
    "launched algorithm": ("InputError", "the launcher gave --algorithm"),
    "ranks differ": ("MismatchError", "ranks disagree on options: {'staleness': 0} on rank 0"),
    "shapes differ": ("MismatchError", "ranks disagree on tensor 0: weight of [3, 4] torch.float32 on rank 0"),
}


def test_a_gradient_without_a_step_is_in_what_all_have_at_the_end(two_ranks):
    assert two_ranks.run("tests.live.served:without_its_last_step") == [[], []]


@pytest.mark.parametrize("after", [{0: 2}, {1: 3}, {0: 1, 1: 4}], ids=str)
def test_each_rank_may_fetch_the_optimizers_state_when_it_likes(two_ranks, after):
    assert two_ranks.run("tests.live.served:fetched_by", after=after) == [([], []), ([], [])]


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_what_a_script_writes_before_the_end_is_kept_or_refused(two_ranks, staleness):
    outcomes = two_ranks.run("tests.live.served:written_before_the_end", staleness=staleness)
    if staleness == 0:
        assert outcomes == [("nothing", "")] * 2
        return
    heard = dict(outcomes)  # or nothing by a rank that closes when the job has failed
    assert "UnsupportedError" in heard
    assert heard.keys() <= {"UnsupportedError", "PeerFailed", "nothing"}
    assert all("the script wrote to layers.1.weight" in text for kind, text in outcomes if kind != "nothing")


@pytest.mark.parametrize(
    "what", ["without elements", "another group", "groups in another order", "a group less", "a parameter elsewhere"]
)
def test_odd_parameters_and_groups_train_as_under_ddp_or_are_refused(two_ranks, what):
    if what not in ("a group less", "a parameter elsewhere"):
        assert two_ranks.run("tests.live.served:beside_ddp", what=what) == [[], []]
        return
    for ok, (kind, text, _) in two_ranks.try_run("tests.live.served:beside_ddp", what=what):
        assert not ok
        assert kind in ("UnsupportedError", "PeerFailed")
        assert "have got other options than the rest of it, or are in no optimizer" in text


def test_a_number_that_no_update_can_have_ends_the_job_on_all_ranks(two_ranks):
    (kind, heard), (own_kind, text) = two_ranks.run("tests.live.served:refused_number")
    assert (kind, own_kind) == ("PeerFailed", "InputError")
    here, what = text.split(": ", 1)
    assert here == "rank 1, iteration 2"
    assert what.startswith("the optimizer's numbers: got Sgd(lr=-0.1, ")
    assert heard == f"transport: rank 1 failed in iteration 2: InputError: {what}"


def test_a_momentum_that_goes_to_zero_ends_the_job_on_all_ranks(two_ranks):
    (kind, heard), (own_kind, text) = two_ranks.run("tests.live.served:refused_number", number="momentum", value=0.0)
    assert (kind, own_kind) == ("PeerFailed", "UnsupportedError")
    assert text.startswith("rank 1, iteration 2: the momentum of parameter group 0 went from or to 0")
    assert heard.startswith("transport: rank 1 failed in iteration 2: UnsupportedError: the momentum of parameter group 0")


def test_a_rank_that_waits_for_others_to_close_says_so(two_ranks):
    lines, _ = two_ranks.run("tests.live.served:closed_later")
    assert lines[0].startswith("gradlane: rank 0 waits for every rank to call close() of this session")


def test_a_value_that_does_not_come_in_time_is_named(two_ranks):
    text, _ = two_ranks.run("tests.live.served:too_late")
    assert text.startswith("CommunicationError: iteration 2: the new value of layers.")
    assert text.endswith("did not come within 2 s; is another rank slow, or gone?")


def test_an_optimizer_of_frozen_parameters_alone_does_nothing(two_ranks):
    assert two_ranks.run("tests.live.served:with_a_frozen_half") == [True, True]


def test_the_state_that_a_failed_job_has_left_on_the_servers_is_not_read(two_ranks):
    for raised in two_ranks.run("tests.live.served:state_after_a_failure"):
        assert [kind for kind, _ in raised] == ["JobError"] * 2
        assert all("the state of SGD was on the servers when the job failed" in text for _, text in raised)


def test_a_signal_handler_never_runs_while_values_are_copied(two_ranks):
    for seen in two_ranks.run("tests.live.served:interrupted"):
        assert seen
        assert not any(seen)


def test_a_parameter_that_was_frozen_when_the_servers_got_the_others_is_not_trained(two_ranks):
    outcomes = two_ranks.run("tests.live.served:thawed")
    assert {kind for kind, _ in outcomes} <= {"JobError", "PeerFailed"}
    for _, text in outcomes:
        assert "layers.1.weight was frozen at attach and is trained now" in text


@pytest.mark.parametrize("how", ATTACHED)
def test_what_servers_cannot_train_is_refused_before_the_first_step(two_ranks, how):
    kind, text = ATTACHED[how]
    for found, said in two_ranks.run("tests.live.served:attached", how=how):
        assert (found, text in said) == (kind, True), said


@pytest.mark.parametrize(("staleness", "buffers"), [(0, False), (0, True), (2, False)])
def test_a_rank_with_fewer_steps_is_named_by_all(two_ranks, staleness, buffers):
    (kind, text), (_, heard) = two_ranks.run("tests.live.served:leaves_early", staleness=staleness, buffers=buffers)
    assert kind == "PeerDied"
    assert "rank 1 left the job after 5 iterations" in text
    assert "rank 1 left the job after 5 iterations" in heard


@pytest.mark.timing
def test_a_rank_that_stops_is_noticed_while_another_waits_for_its_buffers():
    ranks = Ranks(2)
    try:
        (_, (kind, after_s)), _ = ranks.try_run("tests.live.served:stops")
        assert kind == "PeerStalled"
        assert after_s < 7
    finally:
        ranks.close()


def test_a_rank_that_dies_ends_the_training_of_all():
    ranks = Ranks(3)
    try:
        outcomes = ranks.try_run("tests.live.served:dies")
        assert outcomes[2] == (False, ("ProcessEnded", "exit code 3", ""))
        for _, (kind, text) in outcomes[:2]:
            assert kind == "PeerDied"
            assert "2" in text
    finally:
        ranks.close()


def test_servers_of_their_own_give_what_ddp_gives():
    name = "a_branch_left_out_by_one_rank_only"
    served = Served(2, 2)
    assert served.ranks.run("tests.live.served:compare", name=name, servers=2) == [[], []]
    assert served.close() == [0, 0]


@pytest.mark.extra
def test_the_example_gives_its_output():
    example = ROOT / "examples" / "asynchronous.py"
    done = gradlane("launch", "--standalone", "--nproc", 2, "--backend", "server", "--servers", 1, example)
    assert done.stdout.splitlines() == example.with_suffix(".out").read_text().splitlines()
