"""Training under every policy gives the bits that torch's DistributedDataParallel gives."""

from __future__ import annotations

import pytest

from gradlane.core.network import Network
from gradlane.planning import catalog
from tests.live.models import MODELS, OPTIMIZERS

pytestmark = pytest.mark.matrix

# so small that models of 100 KB travel in many messages
KNOBS = {
    "ddp": {"bucket_bytes": 8000, "first_bucket_bytes": 1000},
    "p3": {"slice_bytes": 8000},
    "bytescheduler": {"partition_bytes": 8000, "credit_bytes": 16000},
    "geryon": {"slice_bytes": 8000},
    "dear": {"fusion_bytes": 16000},
    "blocks": {"least_bytes": 8000, "most_bytes": 8000},
    "owners": {"least_bytes": 8000, "most_bytes": 40000},
    "searched": {"moves": 2000},
}
GIVEN = Network.line(2, startup_ns=20_000, bytes_per_second=10**9)  # to measure one takes half a second a session
EVERY_POLICY = [(name, KNOBS.get(name, {})) for name in catalog.names("all-reduce")]
OVER_SERVERS = [(name, KNOBS.get(name, {})) for name in catalog.names("server")]
# what a policy does otherwise than by default
CHOICES = [
    ("p3", {"slice_bytes": 8000, "buffer_bytes": 16000}),
    ("p3", {"slice_bytes": 8000, "until": "acknowledged"}),
    ("bytescheduler", {"partition_bytes": 8000, "credit_bytes": 16000, "until": "acknowledged"}),
    ("geryon", {"slice_bytes": 8000, "threshold": "auto"}),
    ("geryon", {"slice_elements": 2000, "shards": 3}),
    ("geryon", {"slice_elements": 2000, "shards": 3, "pulls": "after pushes", "pull_seed": 3}),
]
SLICES = ("bytescheduler", KNOBS["bytescheduler"])


# every optimizer, and both models with those that are used most
PAIRS = [("convolutions", name) for name in ("sgd", "adam", "rmsprop")] + [
    ("tied-transformer", name) for name in OPTIMIZERS if name != "rmsprop"
]


@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
def test_every_policy_equals_ddp_bit_for_bit_after_30_steps(two_ranks, model, optimizer):
    outcomes = two_ranks.run(
        "tests.live.cases:equals_ddp", model=model, optimizer=optimizer, policies=EVERY_POLICY, network=GIVEN
    )
    for found in outcomes:
        assert found == {str(policy): [] for policy in EVERY_POLICY}


def test_a_policys_choices_do_so_too(two_ranks):
    case = {"model": "tied-transformer", "optimizer": "adam", "policies": CHOICES, "network": GIVEN}
    for found in two_ranks.run("tests.live.cases:equals_ddp", **case):
        assert found == {str(policy): [] for policy in CHOICES}


@pytest.mark.parametrize(
    ("model", "optimizer", "policies", "options"),
    [
        ("tied-transformer", "adam", OVER_SERVERS, {}),
        ("tied-transformer", "adam", [*CHOICES, "prophet"], {}),
        *((model, "sgd", [SLICES, "mercury"], {}) for model in MODELS),
        ("tied-transformer", "sgd", [SLICES, "mercury"], {"summation_order": "rank", "packet_bytes": 1024}),
    ],
)
def test_so_does_every_policy_over_servers(two_ranks, model, optimizer, policies, options):
    outcomes = two_ranks.run(
        "tests.live.cases:equals_ddp",
        model=model,
        optimizer=optimizer,
        policies=policies,
        network=GIVEN,
        backend="server",
        **options,
    )
    for found in outcomes:
        assert found == {str(policy): [] for policy in policies}


def test_so_does_every_policy_over_servers_of_two_hosts(two_ranks):
    policies = [*OVER_SERVERS, *CHOICES]
    case = {"model": "tied-transformer", "optimizer": "sgd", "policies": policies, "steps": 12, "network": GIVEN}
    for found in two_ranks.run("tests.live.host_sums:equals_ddp", backend="server", **case):
        assert found == {str(policy): [] for policy in policies}


@pytest.mark.parametrize(("model", "backend"), [*((model, "all-reduce") for model in MODELS), ("tied-transformer", "server")])
def test_it_does_so_when_sums_arrive_late_and_updates_are_deferred(two_ranks, model, backend):
    crossing = [(name, knobs) for name, knobs in EVERY_POLICY if name in ("p3", "tictac", "bytescheduler", "blocks", "dear")]
    case = "tests.live.cases:equals_ddp_on_a_slow_network"
    options = {"optimizer": "adam", "policies": crossing, "steps": 12, "network": GIVEN, "backend": backend}
    outcomes = two_ranks.run(case, model=model, **options)
    for found, deferred in outcomes:
        assert found == {str(policy): [] for policy in crossing}
        assert deferred > 30


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_it_does_so_when_the_network_is_measured_at_attach(two_ranks, backend):
    options = {"optimizer": "sgd", "policies": ["mg-wfbp"], "steps": 8, "backend": backend}
    outcomes = two_ranks.run("tests.live.cases:equals_ddp", model="convolutions", **options)
    assert outcomes == [{"mg-wfbp": []}] * 2
