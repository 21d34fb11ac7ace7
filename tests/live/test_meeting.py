"""Meeting before `init_process_group`: what is wrong with ranks and world sizes is said, by all, soon."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from gradlane.errors import MismatchError
from gradlane.live.comm.roll_call import RollCall
from gradlane.live.startup.agreement import settle
from tests.ports import free_port

SCRIPT = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
one = torch.ones(1)
dist.all_reduce(one)
print("sum", int(one), flush=True)
sys.stdin.readline()
dist.destroy_process_group()
"""


class Job:
    """Processes with the given (rank, world size), started one after the other by `gradlane launch`'s worker."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "script.py"
        self._script.write_text(SCRIPT)
        self._port = free_port()

    def start(self, rank: object, world: object) -> subprocess.Popen[str]:
        place = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        command = [sys.executable, "-m", "gradlane.live.startup.boot", str(self._script)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env={**os.environ, **place}, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def last_line(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    return errors.strip().splitlines()[-1]


@pytest.mark.extra
def test_ranks_that_agree_meet_and_a_second_process_of_the_same_rank_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    ranks = [job.start(0, 2), job.start(1, 2)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "sum 2\n"
    assert "MismatchError: RANK=1 is taken by" in last_line(job.start(1, 2))
    for rank in ranks:
        rank.communicate("\n", timeout=60)
        assert rank.returncode == 0


def test_ranks_that_disagree_on_the_world_size_all_hear_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for process in [job.start(0, 2), job.start(1, 3)]:
        assert "MismatchError: ranks disagree on the world size: 2 on rank 0, 3 on rank 1" in last_line(process)


def test_a_rank_that_never_comes_is_named_to_all(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for process in [job.start(0, 3), job.start(1, 3)]:
        assert "MismatchError: 2 of 3 ranks came to the meeting within 8 s; missing: [2]" in last_line(process)


def test_a_rank_out_of_range_names_the_variable_and_its_value(tmp_path: Path) -> None:
    assert "InputError: RANK: got '5', expected an integer from 0 to 1" in last_line(Job(tmp_path).start(5, 2))
    assert "InputError: RANK: got 'one', expected an integer from 0 to 1" in last_line(Job(tmp_path).start("one", 2))


def _meet(store: dist.Store, rank: int, entry: str, timeout_s: float = 30.0) -> tuple[RollCall, list[str]]:
    judged: list[str] = []

    def judge(entries: list[bytes]) -> str:
        judged.extend(each.decode() for each in entries)
        return ""

    roll = RollCall(store, rank, 2)
    settle(roll, entry.encode(), judge, "came", timeout_s)
    return roll, judged


def test_what_an_earlier_attempt_has_written_is_not_believed() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        earlier = [ranks.submit(_meet, store, rank, f"old {rank}") for rank in range(2)]
        assert earlier[0].result()[1] == ["old 0", "old 1"]
        before = store.get("here/1")
        first = ranks.submit(_meet, store, 0, "new 0")
        second = ranks.submit(_meet, store, 1, "new 1")
        meeting, judged = first.result()
        assert judged == ["new 0", "new 1"]
        assert second.result()[0].name == meeting.name != earlier[0].result()[0].name
        assert store.get("here/1") != before
        meeting.store.set("key", "of this meeting")
        assert not earlier[0].result()[0].store.check(["key"])


def test_rank_0_that_comes_last_names_nobody_missing_who_has_waited_for_it() -> None:
    store = dist.HashStore()
    with pytest.raises(MismatchError, match="rank 1: no verdict from rank 0"):
        _meet(store, 1, "early", timeout_s=-4.9)  # and five seconds of grace
    with pytest.raises(
        MismatchError, match=r"1 of 2 ranks came within 0 s; ranks \[1\] came before and waited for rank 0 in vain"
    ):
        _meet(store, 0, "late", timeout_s=0.3)


def test_a_rank_of_an_earlier_attempt_does_not_stand_for_one_that_never_comes() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        for each in [ranks.submit(_meet, store, rank, "old") for rank in range(2)]:
            each.result()
    with pytest.raises(MismatchError, match=r"1 of 2 ranks came within 0 s; missing: \[1\]"):
        _meet(store, 0, "new", timeout_s=0.3)
