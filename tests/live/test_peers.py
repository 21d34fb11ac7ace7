"""The control channel by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch.distributed as dist

from gradlane.live.comm.control_channel import ControlChannel
from tests.processes import AT_ONCE_S


def nothing(*_: object) -> None:
    return None


def test_a_rank_that_leaves_before_the_last_one_comes_has_come():
    store, left = dist.HashStore(), []
    peers = partial(ControlChannel, store, world=3, timeout_s=30.0, on_failure=nothing, on_choice=nothing, on_decision=nothing)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0, on_left=left.append)
        peers(rank=1, on_left=nothing).close()
        last = peers(rank=2, on_left=nothing)
        first.result(AT_ONCE_S).close()
        last.close()
    assert left[0] == 1
