"""attach: what it takes, what it refuses and why."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from statistics import median

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

import gradlane
from gradlane import policies
from gradlane.core.backends import BACKENDS
from gradlane.core.bus import Bus
from gradlane.core.cluster import Cluster
from gradlane.core.launch_options import LaunchOptions
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import BEFORE_FIRST_USE, UNTIL_BACKWARD, Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import InputError, JobError, PlanError, UnsupportedError
from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.session import gradient_groups
from gradlane.live.startup.options import AttachOptions, SteppingOptions
from gradlane.planning.plans import make_plan
from gradlane.planning.questions import Case, judge, sweep
from tests.live.loops import Mlp, momentum

GIVEN = Network.line(1, startup_ns=20_000, bytes_per_second=10**9)


@pytest.fixture
def a_world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Around(torch.optim.Optimizer):
    """Around another optimizer, as Lookahead of several libraries."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state


def _trained(model: nn.Module, steps: int, **options: object) -> tuple[list[torch.Tensor], Plan | None]:
    torch.manual_seed(3)
    optimizer = momentum(model)
    session = gradlane.attach(model, optimizer, network=GIVEN, **options) if options else None
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x, y = Mlp.batch(generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if session is not None:
        session.close()
    return [param.detach().clone() for param in model.parameters()], None if session is None else session.plan


def _model() -> Mlp:
    torch.manual_seed(1)
    return Mlp()


def _plan(policy: str = "bytescheduler", **knobs: int) -> Plan:
    plan = _trained(_model(), 6, policy=gradlane.policies.get(policy, **knobs))[1]
    assert plan is not None
    return plan


def test_a_world_of_one_trains_as_without_gradlane(a_world_of_one):
    alone, _ = _trained(_model(), 8)
    attached, plan = _trained(_model(), 8, policy="bytescheduler")
    assert all(torch.equal(a, b) for a, b in zip(alone, attached, strict=True))
    assert plan.policy == "bytescheduler"


def test_a_policys_knobs_may_follow_its_name(a_world_of_one):
    _, plan = _trained(_model(), 6, policy="bytescheduler:partition_bytes=2000")
    assert plan.messages == _plan(partition_bytes=2000).messages


def test_a_world_of_one_is_its_own_server(a_world_of_one):
    alone, _ = _trained(_model(), 8)
    attached, plan = _trained(_model(), 8, policy="mercury", backend="server")
    assert all(torch.equal(a, b) for a, b in zip(alone, attached, strict=True))
    assert plan.policy == "mercury"
    assert plan.sequence is None


def test_a_plan_is_taken_as_it_is_when_it_has_a_sequence(a_world_of_one):
    plan = _plan(partition_bytes=2000)
    assert plan.sequence is not None
    assert _trained(_model(), 4, policy=plan)[1] == plan


def test_a_plan_without_a_sequence_gets_one_from_measured_iterations(a_world_of_one):
    plan = replace(_plan(partition_bytes=2000), sequence=None)
    used = _trained(_model(), 6, policy=plan)[1]
    assert sorted(used.sequence) == list(range(len(plan.messages)))
    assert replace(used, sequence=None) == plan


def test_a_plan_of_another_model_is_refused_at_attach_with_the_first_difference(a_world_of_one):
    plan = _plan()
    wider = _model()
    wider.layers[0] = nn.Linear(12, 41)
    wider.layers[1] = nn.Linear(41, 60)
    with pytest.raises(PlanError, match=r"another model: tensor \d is layers\.1\.weight \(9600 B, float32\) in the plan"):
        gradlane.attach(wider, momentum(wider), plan)


def test_a_plan_of_a_smaller_model_is_refused(a_world_of_one):
    plan = _plan()
    longer = _model()
    longer.layers.append(nn.Linear(6, 6))
    with pytest.raises(PlanError, match="it has 8 tensors, the model 10"):
        gradlane.attach(longer, momentum(longer), plan)


def test_a_plan_that_all_reduce_cannot_carry_out_is_refused(a_world_of_one):
    plan = replace(_plan(), wire="packet-priority")
    with pytest.raises(PlanError, match="wire 'packet-priority' needs gradlane's own transport"):
        gradlane.attach(_model(), None, plan, backend="all-reduce")


@pytest.mark.parametrize(
    ("policy", "options", "simulated"),
    [
        ("mercury", {"backend": "all-reduce"}, GIVEN),
        ("mercury-no-preemption", {"backend": "all-reduce"}, GIVEN),
        ("dear", {"backend": "server", "servers": 2}, Cluster.homogeneous(2, 2, 10**9)),
    ],
)
def test_a_policy_that_a_backend_cannot_carry_is_refused_at_attach_in_the_words_of_the_simulator(
    a_world_of_one, policy, options, simulated
):
    words = []
    for ask in (
        lambda: gradlane.attach(_model(), None, policy, **options),
        lambda: sweep([Case(_profile_of(_model()), simulated)], [policy]),
    ):
        with pytest.raises(PlanError, match=f"^plan {policy}: .* expected .*servers.*; gradlane policies says") as refused:
            ask()
        words.append(str(refused.value))
    assert words[0] == words[1]


@pytest.mark.parametrize(
    "asked", ["mercury", policies.get("mercury"), "a plan for packets", "a plan of a session over servers"]
)
def test_what_only_servers_carry_is_carried_by_servers_where_no_backend_is_named(a_world_of_one, asked):
    if isinstance(asked, str) and "plan" in asked:
        asked = replace(_plan(), wire="packet-priority") if "packets" in asked else replace(_plan(), backend="server")
    model = _model()
    with gradlane.attach(model, momentum(model), asked, network=GIVEN) as session:
        assert isinstance(session._parts.backend, ParameterServerBackend)


def test_a_plan_for_another_backend_than_the_one_that_is_named_is_refused(a_world_of_one):
    with pytest.raises(PlanError, match="it was made for backend 'server', and this is 'all-reduce'"):
        gradlane.attach(_model(), None, replace(_plan(), backend="server"), backend="all-reduce")


@pytest.mark.parametrize("options", [{"policy": "mercury"}, {"policy": "auto"}, {}])
def test_a_coordinator_is_refused_for_what_servers_carry_and_else_leaves_no_choice(options):
    asked = {"order": "coordinator", **options}
    policy = asked.pop("policy", None)
    if policy == "mercury":
        with pytest.raises(InputError, match="expected 'planned' with backend='server'"):
            AttachOptions.of(policy, asked, LaunchOptions())
    else:
        found = AttachOptions.of(policy, asked, LaunchOptions())
        assert (found.backend, found.may_choose_backend) == ("all-reduce", False)


@pytest.mark.parametrize(
    ("policy", "options", "may_choose"),
    [
        (None, {}, True),
        ("auto", {"weight": 2}, True),
        ("auto", {"backend": "all-reduce"}, False),
        ("auto", {"network": GIVEN}, False),
        ("blocks", {}, False),
        (None, {"tune": True}, False),
    ],
)
def test_only_auto_without_a_named_backend_or_network_may_choose_what_carries(policy, options, may_choose):
    found = AttachOptions.of(policy, options, LaunchOptions())
    assert (found.backend, found.may_choose_backend) == ("all-reduce", may_choose)
    named = AttachOptions.of(policy, options, LaunchOptions(backend="server"))
    assert (named.backend, named.may_choose_backend) == ("server", False)


OF_HOSTS = replace(GIVEN, workers=4, bus=Bus(2, 1_000, 10**9))


@pytest.mark.parametrize(
    ("options", "algorithm"),
    [
        ({}, None),
        ({"network": GIVEN}, "flat"),
        ({"network": OF_HOSTS}, "hierarchical"),
        ({"network": OF_HOSTS, "algorithm": "flat"}, "flat"),
    ],
)
def test_a_network_says_by_which_algorithm_it_is_unless_one_is_named(options, algorithm):
    assert AttachOptions.of("ddp", options, LaunchOptions()).algorithm == algorithm
    assert AttachOptions.of("ddp", options, LaunchOptions(algorithm="flat")).algorithm == "flat"
    assert not AttachOptions.of(None, {"algorithm": "flat"}, LaunchOptions()).may_choose_backend


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        (None, {"algorithm": "ring"}, "algorithm: got 'ring', expected 'flat' or 'hierarchical'"),
        (None, {"algorithm": "flat", "backend": "server"}, "algorithm: got 'flat', expected none with backend='server'"),
        ("mercury", {"algorithm": "flat"}, "algorithm: got 'flat', expected none with backend='server'"),
    ],
)
def test_algorithms_are_of_all_reduce(policy, options, said):
    with pytest.raises(InputError, match=re.escape(said)):
        AttachOptions.of(policy, options, LaunchOptions())


@pytest.mark.parametrize(
    ("launched", "expected"),
    [
        (LaunchOptions(timeout=-1.0), "timeout: got -1.0, expected"),
        (LaunchOptions(timeout=0.0), "timeout: got 0.0, expected"),
        (LaunchOptions(weight=0), "weight: got 0, expected"),
        (LaunchOptions(policy="nope"), "policy: got 'nope', expected one of"),
        (LaunchOptions(network="/no/such/file"), "No such file or directory: '/no/such/file'"),
    ],
)
def test_a_wrong_value_of_the_launcher_names_its_variable_and_one_of_the_script_does_not(launched, expected):
    with pytest.raises(InputError, match=r"^GRADLANE_OPTIONS: ") as raised:
        AttachOptions.of(None, {}, launched)
    assert expected in str(raised.value)
    with pytest.raises(InputError, match=r"^timeout: got -2"):
        AttachOptions.of(None, {"timeout": -2}, LaunchOptions(backend="server"))


def _profile_of(model: nn.Module) -> Profile:
    """Times as they are measured: the gradients of each half of the model become ready one after another."""
    params = list(model.named_parameters())[::-1]
    half = len(params) // 2
    tensors = tuple(
        TensorProfile(TensorSpec(name, 4 * param.numel()), 1_000 * place + 1_000_000 * (place >= half), len(params) - 1 - place)
        for place, (name, param) in enumerate(params)
    )
    return Profile("Mlp", "cpu", tensors, tuple(Layer(name, 10_000) for name, _ in params[::-1]), 2_000_000)


@pytest.mark.parametrize(("name", "backend"), [(name, backend) for backend in BACKENDS for name in policies.names(backend)])
def test_a_session_plans_what_is_simulated(a_world_of_one, name, backend):
    model = _model()
    profile = _profile_of(model)
    plan = make_plan(policies.get(name), profile, Place(GIVEN, backend))
    assert _trained(model, 2, policy=name, backend=backend, profile=profile)[1] == plan
    if backend == "all-reduce":
        assert judge(policies.get(name), Case(profile, GIVEN)).plan == plan


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do(a_world_of_one):
    with pytest.raises(
        InputError, match=r"policy: got 'bytescheduller' \(did you mean bytescheduler\?\), expected one of wfbp"
    ):
        gradlane.attach(_model(), None, "bytescheduller")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight": 9}, "weight: got 9, expected an integer from 1 to 8"),
        ({"order": "any"}, "order: got 'any', expected 'planned' or 'coordinator'"),
        ({"timeout": 0}, "timeout: got 0"),
        ({"stall_timeout": 0.5}, "stall_timeout: got 0.5, expected seconds, from 1 to 86400"),
        ({"profile_iterations": 0}, "profile_iterations: got 0, expected an integer from 1 to"),
        ({"profile_iterations": 2.5}, "profile_iterations: got 2.5, expected an integer"),
        ({"verify": "x"}, "verify: got 'x', expected True, False or a gradlane.VerifyOptions"),
        ({"policy": "bytescheduler", "tune": "x"}, "tune: got 'x', expected True, False or a TuneOptions"),
        ({"cross_barrier": "no"}, "cross_barrier: got 'no', expected True, False or None"),
        ({"broadcast_buffers": 1}, "broadcast_buffers: got 1, expected True, False or 'forward'"),
        ({"keep_log": "x"}, "keep_log: got 'x', expected True or False"),
        ({"stall_timeout": "x"}, "stall_timeout: got 'x', expected seconds"),
        ({"timeout": float("inf")}, "timeout: got inf, expected a number of seconds, more than 0 and at most 31536000"),
        ({"timeout": float("nan")}, "timeout: got nan"),
        ({"backend": "nccl"}, "backend: got 'nccl', expected 'all-reduce' or 'server'"),
        ({"packet_bytes": 1024}, "packet_bytes: got 1024, expected none: packets are of backend='server'"),
        ({"summation_order": "rank"}, "summation_order: got 'rank', expected none: it is of backend='server'"),
        ({"backend": "server", "packet_bytes": 1000}, "packet_bytes: got 1000, expected a multiple of 64"),
        ({"backend": "server", "packet_bytes": 1 << 20}, "packet_bytes: got 1048576, expected an integer from 64 to"),
        ({"backend": "server", "summation_order": "any"}, "summation_order: got 'any', expected 'arrival' or 'rank'"),
        ({"backend": "server", "order": "coordinator"}, "expected 'planned' with backend='server', which needs no order"),
        ({"optimizer": "sgd"}, "optimizer: got a str"),
        ({"optimizer": [1]}, "optimizer: got a int"),
        ({"optimizer": object()}, r"optimizer: got a object, expected a torch\.optim\.Optimizer"),
        ({"optimizer": _Around(momentum(nn.Linear(2, 2)))}, "optimizer: got a _Around, which never called Optimizer.__init__"),
        ({"optimizer": momentum(nn.Linear(2, 2))}, r"optimizer: none of the 2 parameters of this SGD is the model's"),
        ({"network": "net.json"}, r"network: got 'net\.json', expected a gradlane\.Network \(gradlane\.core\.files\.read"),
        ({"profile": "profile.json"}, r"profile: got 'profile\.json', expected a gradlane\.Profile"),
        ({"timeout": timedelta(seconds=60)}, "timeout: got .* expected a number of seconds"),
    ],
)
def test_an_option_of_no_use_is_refused(a_world_of_one, options, reason):
    with pytest.raises(InputError, match=reason):
        gradlane.attach(_model(), **options)


@pytest.mark.parametrize("model", [nn.Linear(2, 2).parameters(), None, "resnet50"])
def test_what_is_no_module_is_refused(a_world_of_one, model):
    with pytest.raises(InputError, match=rf"model: got a {type(model).__name__}, expected the torch\.nn\.Module itself"):
        gradlane.attach(model)


def test_one_of_several_ranks_is_refused_before_init_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"call torch\.distributed\.init_process_group"):
        gradlane.attach(_model())


def _alone() -> list[torch.Tensor]:
    model = _model()
    optimizer = momentum(model)
    with gradlane.attach(model, optimizer) as session:
        assert type(session) is gradlane.live.IdleSession
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        for _ in range(3):
            with session.no_sync():
                model(torch.ones(2, 12)).sum().backward()
            optimizer.step()
        session.flush()
        with pytest.raises(JobError, match="no plan: one process trains alone"):
            print(session.plan)
    assert session.closed
    return [param.detach().clone() for param in model.parameters()]


def test_a_process_that_trains_alone_gets_a_session_that_does_nothing():
    model = _model()
    optimizer = momentum(model)
    for _ in range(3):
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(_alone(), model.parameters(), strict=True))


def test_one_rank_of_which_nothing_is_asked_gets_a_session_that_does_nothing(a_world_of_one):
    _alone()


def test_an_idle_session_has_what_scripts_use_of_a_session():
    def public(kind: type) -> set[str]:
        return {name for name in (*dir(kind), "model", "rank", "world", "closed") if not name.startswith("_")}

    # what `attach` itself calls, before it hands a session over or when that is closed
    of_attach = {"on_close", "print_progress", "has_profile"}
    assert public(gradlane.live.Session) - public(gradlane.live.IdleSession) == of_attach


def _sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))


def _frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def _complex() -> nn.Module:
    return nn.Linear(4, 4, dtype=torch.complex64)


def _of_two_dtypes() -> nn.Module:
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_sparse, "^0 has sparse gradients"),
        (_frozen, "no parameter with requires_grad"),
        (lambda: nn.LazyLinear(4), "weight is uninitialised"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "running_mean is uninitialised"),
        (_complex, "bias is of torch.complex64|weight is of torch.complex64"),
        (_of_two_dtypes, "weight is of torch.bfloat16 and has grad_dtype torch.float32"),
        (lambda: torch.jit.script(nn.Linear(4, 4)), "ScriptModule"),
        (lambda: nn.DataParallel(nn.Linear(4, 4)), "the model is a DataParallel, which computes on copies"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(a_world_of_one, make, reason):
    with pytest.raises(UnsupportedError, match=reason):
        gradlane.attach(make())


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.Sequential(model)], ids=["itself", "a part"])
def test_ddp_around_or_inside_a_model_is_refused_at_attach(a_world_of_one, wrap):
    with pytest.raises(
        UnsupportedError, match="is a DistributedDataParallel, which sums gradients too: attach to the model before"
    ):
        gradlane.attach(wrap(nn.parallel.DistributedDataParallel(_model())))


@pytest.mark.parametrize("where", ["around", "further around", "inside"])
@pytest.mark.parametrize("served", [False, True], ids=["attach", "attach_to_servers"])
def test_ddp_put_around_or_inside_a_model_later_is_refused_in_the_next_forward_pass(a_world_of_one, where, served):
    model = _model()
    attach = gradlane.attach_to_servers if served else partial(gradlane.attach, network=GIVEN)
    with attach(model, momentum(model)):
        called: nn.Module = model
        if where == "inside":
            if served:
                return  # only sessions that measure their first iterations look for it
            model.layers[1] = nn.parallel.DistributedDataParallel(model.layers[1])
        else:
            called = nn.parallel.DistributedDataParallel(model if where == "around" else nn.Sequential(model))
        with pytest.raises(
            UnsupportedError, match=r"DistributedDataParallel was put around .* since attach, and sums gradients"
        ):
            called(torch.randn(2, 12))


def test_a_model_attached_to_already_is_refused(a_world_of_one):
    model = _model()
    session = gradlane.attach(model, momentum(model), network=GIVEN)
    with pytest.raises(UnsupportedError, match="attached to this model already"):
        gradlane.attach(model, momentum(model), network=GIVEN)
    session.close()
    gradlane.attach(model, momentum(model), network=GIVEN).close()


def test_a_parameter_trained_after_attach_that_was_frozen_is_an_error_that_names_it(a_world_of_one):
    model = _model()
    model.layers[1].requires_grad_(False)
    with gradlane.attach(model, momentum(model), network=GIVEN):
        model.layers[1].weight.requires_grad_(True)
        with pytest.raises(JobError, match=r"layers\.1\.weight was frozen at attach"):
            model(torch.randn(2, 12))


def test_the_gradients_of_a_closed_session_are_plain_tensors_and_so_are_the_parameters(a_world_of_one):
    model = _model()
    session = gradlane.attach(model, momentum(model), network=GIVEN)
    model(torch.randn(2, 12)).sum().backward()
    assert type(model.layers[0].weight.grad) is not torch.Tensor
    session.close()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert {type(param.grad) for param in model.parameters()} == {torch.Tensor}
    assert session.closed


def test_a_measured_profile_has_what_the_script_does_between_passes_and_steps(a_world_of_one):
    model = _model()
    optimizer = momentum(model)
    marks: list[list[int]] = []

    def works() -> None:
        torch.randn(300, 300) @ torch.randn(300, 300)

    def mark() -> None:
        marks[-1].append(time.monotonic_ns())

    with gradlane.attach(model, optimizer, network=GIVEN, profile_iterations=3) as session:
        for _ in range(6):
            marks.append([])
            mark()
            output = model(torch.randn(2, 12))
            mark()
            works()  # a loss outside of the model
            mark()
            output.sum().backward()
            mark()
            works()  # a script that clips or logs
            mark()
            optimizer.step()
            mark()
            works()  # the next inputs
            mark()
        profile = session.profile()

    def spent(start: int, end: int) -> float:  # in the iterations that are measured
        times = [mark for each in marks for mark in each[:-1]] + marks[-1][-1:]
        return median(times[6 * each + end] - times[6 * each + start] for each in range(1, 4))

    until_backward = profile.layers[-1]
    assert until_backward.name == UNTIL_BACKWARD
    assert not any(tensor.layer == len(profile.layers) - 1 for tensor in profile.tensors)
    assert spent(1, 2) <= until_backward.forward_ns <= spent(0, 3)
    assert spent(3, 4) + spent(5, 6) <= profile.uncovered_ns <= spent(2, 5) + spent(4, 7)


def test_what_a_forward_pass_does_before_it_uses_a_parameter_waits_for_none(a_world_of_one):
    took_ns = []

    class Prepares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            began_ns = time.monotonic_ns()
            torch.randn(300, 300) @ torch.randn(300, 300)
            took_ns.append(time.monotonic_ns() - began_ns)
            return self.model(inputs)

    model = Prepares()
    optimizer = momentum(model)
    with gradlane.attach(model, optimizer, network=GIVEN, profile_iterations=3) as session:
        for _ in range(5):
            model(torch.randn(2, 12)).sum().backward()
            optimizer.step()
        profile = session.profile()
    assert profile.layers[0].name == BEFORE_FIRST_USE
    assert profile.layers[0].forward_ns >= median(took_ns[1:4])
    assert min(tensor.layer for tensor in profile.tensors) == 1


def test_passes_that_are_not_calls_of_the_model_leave_no_other_time_in_the_profile(a_world_of_one):
    model = _model()
    optimizer = momentum(model)
    took_ns = []
    with gradlane.attach(model, optimizer, network=GIVEN, profile_iterations=3) as session:
        for step in range(5):
            began_ns = time.monotonic_ns()
            output = (model if step < 2 else model.forward)(torch.randn(2, 12))  # two calls of the model, then none
            output.sum().backward()
            took_ns.append(time.monotonic_ns() - began_ns)
            for _ in range(20):
                torch.randn(300, 300) @ torch.randn(300, 300)
            optimizer.step()
        profile = session.profile()
    assert profile.forward_ns <= took_ns[1]


def test_the_passes_and_steps_of_an_iteration_are_all_in_its_profile(a_world_of_one):
    took_ns: dict[str, list[int]] = {"passes": [], "steps": []}

    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            began_ns = time.monotonic_ns()
            torch.randn(300, 300) @ torch.randn(300, 300)
            super().step(closure)
            took_ns["steps"][-1] += time.monotonic_ns() - began_ns

    model = _model()
    optimizers = [Slow(part.parameters(), 0.01) for part in (model.layers[:2], model.layers[2:])]
    with gradlane.attach(model, optimizers, network=GIVEN, profile_iterations=3) as session:
        for _ in range(5):
            took_ns["steps"].append(0)
            with session.no_sync():
                first = model(torch.randn(2, 12)).sum()
                began_ns = time.monotonic_ns()
                first.backward()
                model(torch.randn(2, 12)).sum().backward()
            last = model(torch.randn(2, 12)).sum()
            took_ns["passes"].append(time.monotonic_ns() - began_ns)
            last.backward()
            for optimizer in optimizers:
                optimizer.step()
        profile = session.profile()
    passes, steps = (median(took_ns[what][1:4]) for what in ("passes", "steps"))
    assert passes <= profile.layers[-1].forward_ns
    assert steps <= profile.update_ns + len(profile.layers)  # each layer's part is rounded down


def test_a_gradient_read_inside_the_backward_pass_is_refused_at_once(a_world_of_one, monkeypatch):
    monkeypatch.setattr(gradient_groups, "_MOST_BYTES", 0)  # gradients are sent one by one
    model = _model()
    with gradlane.attach(model, momentum(model), network=GIVEN, profile_iterations=1):
        for _ in range(3):
            model(torch.randn(2, 12)).sum().backward()
        last = model.layers[3].weight  # whose gradient is sent first
        model.layers[0].weight.register_hook(lambda _: print(last.grad.norm()))
        with pytest.raises(JobError, match=r"layers\.3\.weight is read, or accumulated into once more, after it was sent"):
            model(torch.randn(2, 12)).sum().backward()


@pytest.mark.parametrize("statistics", ["of the batch", "as they are"])
def test_sync_batch_norm_does_what_it_does_without_gradlane(a_world_of_one, statistics):
    def outcome(attached: bool) -> list[torch.Tensor] | str:
        torch.manual_seed(1)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6)))
        model[1].train(statistics == "of the batch")
        optimizer = momentum(model)
        session = gradlane.attach(model, optimizer, network=GIVEN) if attached else None
        try:
            for step in range(6):
                optimizer.zero_grad()
                model(torch.full((4, 12), float(step))).square().sum().backward()
                optimizer.step()
        except ValueError as error:  # torch's, who computes statistics of the batch on devices only
            return str(error)
        finally:
            if session is not None:
                session.close()
        return [value.detach().clone() for value in (*model.parameters(), *model.buffers())]

    alone, attached = outcome(attached=False), outcome(attached=True)
    if isinstance(alone, str):
        assert attached == alone
    else:
        assert all(torch.equal(a, b) for a, b in zip(alone, attached, strict=True))


def test_a_job_waits_as_long_as_its_process_group_unless_somebody_says_otherwise() -> None:
    assert SteppingOptions().timeout is None
    assert AttachOptions.of(None, {}, LaunchOptions()).stepping.timeout is None
    assert AttachOptions.of(None, {"timeout": 5.0}, LaunchOptions()).stepping.timeout == 5.0
    assert AttachOptions.of(None, {"timeout": 5.0}, LaunchOptions(timeout=7.0)).stepping.timeout == 7.0
