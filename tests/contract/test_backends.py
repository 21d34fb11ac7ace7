"""What every backend of gradlane promises, among three ranks. Only the ranks import torch."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from gradlane.core.plan import WIRES
from tests.live.ranks import RankError, Ranks

pytestmark = pytest.mark.matrix

TIMEOUT_S = 60.0
_MADE = itertools.count()  # backends, on each rank


def new_groups() -> Any:
    """On each rank: what makes process groups over all ranks, for one more backend."""
    import torch.distributed as dist

    from gradlane.live.backends.process_groups import NewGroups

    name = f"check{next(_MADE)}"
    return NewGroups(None, dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store()), name)


def made(name: str, **options: Any) -> Any:
    """On each rank: the backend of that name."""
    import torch

    from gradlane.live.backends.all_reduce import AllReduceBackend
    from gradlane.live.backends.carriers import Carriers
    from gradlane.live.backends.parameter_server import ParameterServerBackend
    from gradlane.live.startup.options import AttachOptions, CarrierOptions

    if name == "carriers":
        return Carriers(made("all-reduce", **options), made("server", **options))
    groups = new_groups()
    if name == "all-reduce":
        return AllReduceBackend(torch.device("cpu"), None, groups, TIMEOUT_S, **options)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    order = "rank" if options.pop("rank_order", False) else None
    carrier = CarrierOptions("server", packet_bytes=1024, summation_order=order, servers=options.pop("external", 0))
    node = AttachOptions(carrier=carrier).node_options(rank, range(world), bytes(32))
    return ParameterServerBackend(groups, node, TIMEOUT_S, **options)


def check(rank: int, world: int, name: str, options: dict[str, Any], **checked: Any) -> list[str]:
    """On each rank: the check. Returns the threads of ours that are left."""
    from gradlane.testing.backends import check_backend

    check_backend(made(name, **options), **checked)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradlane")]


@pytest.mark.parametrize("weight", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_all_reduce(three_ranks: Ranks, weight: int, dtype: str) -> None:
    options = {"weight": weight}
    found = three_ranks.run("tests.contract.test_backends:check", name="all-reduce", options=options, dtype=dtype, owners=True)
    assert found == [[]] * 3


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_gradients_that_travel_as_halves(three_ranks: Ranks, wire_dtype: str) -> None:
    case = {"name": "carriers", "options": {}, "over": ("server", "all-reduce"), "owners": True}
    assert three_ranks.run("tests.contract.test_backends:check", wire_dtype=wire_dtype, **case) == [[]] * 3


@pytest.mark.parametrize("rank_order", [True, False])
@pytest.mark.parametrize("weight", [1, 2])
def test_servers_beside_the_ranks(three_ranks: Ranks, rank_order: bool, weight: int) -> None:
    options = {"rank_order": rank_order, "weight": weight}
    found = three_ranks.run("tests.contract.test_backends:check", name="server", options=options, wires=WIRES, owners=True)
    assert found == [[]] * 3


def check_carriers(rank: int, world: int, **options: Any) -> list[str]:
    """On each rank: the check of both in one session, each plan over one and then over the other."""
    import msgspec

    return check(rank, world, "carriers", options, over=("server", "all-reduce", msgspec.UNSET, "server"), owners=True)


@pytest.mark.parametrize("weight", [1, 2])
def test_all_reduce_and_servers_in_turns(three_ranks: Ranks, weight: int) -> None:
    assert three_ranks.run("tests.contract.test_backends:check_carriers", weight=weight) == [[]] * 3


def check_broken(rank: int, world: int, fault: str) -> None:
    """On each rank: the check, of all-reduce with a fault."""
    from gradlane.live.backends.all_reduce import AllReduceBackend
    from gradlane.testing.backends import check_backend
    from tests.live.networks import Heard

    class Broken(AllReduceBackend):
        def measure(self) -> Any:
            import msgspec

            measured = super().measure()
            if fault != "measured apart":
                return measured
            networks = {name: msgspec.structs.replace(each, source=f"rank {rank}") for name, each in measured.networks.items()}
            return measured._replace(networks=networks)

        def prepare(self, plan: Any, buffers: Any) -> Any:
            return BrokenSums(super().prepare(plan, buffers))

    class BrokenSums(Heard):
        def start(self, message: int, ready: Any, on_done: Any, on_sent: Any) -> bool:
            sums: Any = self._sums
            if fault == "any order":
                sums._issued[sums._lanes[message]] = sums._expected[sums._lanes[message]].index(message)

            def done(message: int, error: Any) -> None:
                if fault == "off by one":
                    sums._buffers[message].tensor[0] += 1
                if fault == "failing":
                    error = RuntimeError("the network is gone")
                if fault == "unasked sends":
                    on_sent(message)
                if fault != "never":
                    on_done(message, error)
                if fault == "twice":
                    on_done(message, error)

            return sums.start(message, ready, done, on_sent)

    import torch

    broken = Broken(torch.device("cpu"), None, new_groups(), TIMEOUT_S)
    check_backend(broken, timeout_s=2.0 if fault == "never" else TIMEOUT_S)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("measured apart", "ranks have measured different networks"),
        ("any order", "expected OrderError"),
        ("off by one", r"the sum of tensor \d is wrong in 1 of \d+ elements, first in 0: got"),
        ("failing", "the network is gone"),
        ("unasked sends", "these sums tell no sends"),
        ("never", r"no end within 2 s; told were \[\[\], "),
        ("twice", r"told \['done', 'done'\], expected \['done'\]"),
    ],
)
def test_a_broken_promise_is_found_and_named(three_ranks: Ranks, fault: str, reason: str) -> None:
    try:
        with pytest.raises(RankError, match=reason):
            three_ranks.run("tests.contract.test_backends:check_broken", fault=fault)
    finally:
        three_ranks.renew()
