"""What ranks measure of the network: alone, in streams, and alike on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradlane.core import files
from gradlane.core.network import Network, Sharing
from gradlane.live.backends.probe import LONGEST_STREAM, STREAM, measure, sweep, sweep_streams
from tests.live.ranks import Ranks


def measured(rank: int, world: int) -> dict[str, Any]:
    """Run on each rank."""
    group, device = dist.new_group(), torch.device("cpu")
    alone = sweep(group, device, (4_096, 65_536, 1_048_576), repeats=2)
    network = measure(group, device, sizes=(4_096, 65_536, 1_048_576)).network(group, device, "a test")
    return {"streams": sweep_streams(group, device, alone, repeats=2), "network": files.dumps(network).decode()}


def test_ranks_measure_messages_alone_and_in_streams_and_find_the_same_network(two_ranks: Ranks) -> None:
    first, second = two_ranks.run("tests.live.test_probe:measured")
    assert first == second
    lengths = {(size, messages) for size, messages, _ in first["streams"]}
    assert all(STREAM <= messages <= (STREAM if size == 1_048_576 else LONGEST_STREAM) for size, messages in lengths)
    assert all(duration_ns > 0 for _, _, duration_ns in first["streams"])
    network = files.loads(first["network"].encode(), Network)
    assert network.sharing == Sharing(max_in_flight=2, chunks=2, chunk_bytes=4 * 2**20, network_classes=1)
    assert 0 <= network.segments[-1].latency_ns <= network.startup_ns
    assert "streams of" in network.source
