"""Whatever goes wrong on one rank, every other rank ends soon, with an error that names the culprit."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradlane.core.launch_options import LaunchOptions
from tests.live.phases import End, Job, harmed, is_named
from tests.live.ranks import Ranks
from tests.live.script_server import ScriptServer

pytestmark = pytest.mark.matrix

FOR_EVER = 10**7
SOON_S = 60.0
"""How long the other ranks may take to end: long for a busy machine, and half of the timeout of job.py at most. That they
heard of it and did not wait for that timeout, their errors say; how long it takes, `python -m bench.faults`.
"""

both = pytest.mark.parametrize("backend", ["all-reduce", "server"])


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    server = ScriptServer()
    yield server
    server.close()


@pytest.fixture
def start(server: ScriptServer, tmp_path: Path) -> Iterator[Any]:
    jobs = []

    def start(*arguments: Any, **options: Any) -> Job:
        world, *others = arguments
        jobs.append(Job(server, tmp_path, "job.py", world, *others, **options))
        for rank in range(world):
            jobs[-1].line(rank)
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


# -- processes that end, stop or raise ---------------------------------------------------------------------------


def ends_after_a_kill(start: Any, fault: str, culprit: int, backend: str) -> list[End]:
    """How the other two of three ranks end."""
    job = start(3, FOR_EVER, fault, culprit, backend)
    job.signal(culprit, signal.SIGKILL)
    ends: list[End] = job.ends([rank for rank in range(3) if rank != culprit], within_s=SOON_S)
    return ends


@both
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_killed_rank_is_named_by_all_others_which_end_soon(start, culprit, backend):
    for end in ends_after_a_kill(start, "none", culprit, backend):
        assert end.code == 1
        assert end.error.startswith(f"gradlane.errors.PeerDied: rank {culprit} is gone: its process ended")


@both
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_script_that_catches_the_error_ends_with_the_exit_code_of_its_own(start, culprit, backend):
    for end in ends_after_a_kill(start, "catch", culprit, backend):
        assert end.code == 7  # not that of a process that was aborted while sums of it were stuck
        assert end.error.startswith(f"rank {culprit} is gone: its process ended")


@both
def test_an_exception_within_attach_ends_the_rank_with_it(start, backend):
    (end,) = start(2, 0, "raise-in-attach", 0, backend).ends([0], within_s=SOON_S)
    assert (end.code, end.error) == (1, "ValueError: no session")


@pytest.mark.timing
@both
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_stopped_rank_is_named_by_all_others_after_two_and_a_half_seconds(start, culprit, backend):
    job = start(3, FOR_EVER, "none", culprit, backend)
    job.signal(culprit, signal.SIGSTOP)
    for end in job.ends([rank for rank in range(3) if rank != culprit], within_s=SOON_S):
        assert end.code == 1
        assert end.after_s > 1.5
        assert end.error.startswith(f"gradlane.errors.PeerStalled: rank {culprit} is stalled: said nothing for")


@pytest.mark.timing
@both
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_stops_for_seconds_and_comes_back_is_waited_for_and_one_line_says_so(start, culprit, backend):
    job = start(3, 60, "none", culprit, backend, options=LaunchOptions())
    job.signal(culprit, signal.SIGSTOP)
    time.sleep(4)
    job.signal(culprit, signal.SIGCONT)
    assert [end.code for end in job.ends([0, 1, 2], within_s=SOON_S)] == [0, 0, 0]
    lines = [line for rank in range(3) for line in job.errors(rank).splitlines()]
    (line,) = [line for line in lines if "has said nothing for" in line]
    assert line.startswith(f"gradlane: rank {culprit} has said nothing for ")
    assert line.endswith("waiting for it, for up to 60 s (stall_timeout=)")


@pytest.mark.timing
@both
def test_a_rank_that_stops_for_less_than_stall_timeout_is_waited_for(start, backend):
    job = start(2, 60, "none", 1, backend)
    job.signal(1, signal.SIGSTOP)
    time.sleep(1)
    job.signal(1, signal.SIGCONT)
    assert [(end.code, end.error) for end in job.ends([0, 1], within_s=SOON_S)] == [(0, ""), (0, "")]


@pytest.mark.timing
@pytest.mark.parametrize(("backend", "culprit"), [("all-reduce", 2), ("server", 2), ("server", 0)])
def test_a_rank_whose_interpreter_stands_still_is_named_in_one_line_and_waited_for(four_ranks, backend, culprit):
    outcomes = four_ranks.run(
        "tests.live.faults:interpreter_that_stands_still", backend=backend, culprit=culprit, seconds=2.2, stall_timeout=1
    )
    assert [differing for differing, _ in outcomes] == [[]] * 4
    ((speaker, line),) = [(rank, line) for rank, (_, lines) in enumerate(outcomes) for line in lines]
    assert speaker == (1 if culprit == 0 else 0)
    # a beat that says so comes every 0.5 s, and a busy machine may lose some of them
    assert re.match(rf"gradlane: rank {culprit} is alive, but its interpreter has not run for [12] s \(", line)
    assert line.endswith("waiting for it, for up to 20 s (timeout=)")


@both
@pytest.mark.parametrize("fault", ["raise", "raise-in-with"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_on_one_rank_is_told_to_all_others_in_its_own_words(start, fault, culprit, backend):
    job = start(3, FOR_EVER, fault, culprit, backend)
    for rank, end in enumerate(job.ends([0, 1, 2], within_s=SOON_S)):
        assert end.code == 1
        if rank == culprit:
            assert end.error == "ValueError: a bad image in shard 17"
        else:
            assert end.error == f"gradlane.errors.PeerFailed: rank {culprit} failed: ValueError: a bad image in shard 17"


@both
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_takes_fewer_steps_is_named_by_the_others(start, culprit, backend):
    job = start(3, FOR_EVER, "leave", culprit, backend)
    ends = job.ends([0, 1, 2], within_s=SOON_S)
    assert ends.pop(culprit)[0::2] == (0, "")
    for end in ends:
        assert end.code == 1
        assert f"gradlane.errors.PeerDied: rank {culprit} left the job while rank" in end.error
        assert end.error.endswith("do all ranks run the same number of steps?")


@both
def test_a_rank_that_takes_fewer_steps_is_named_by_all_others_though_each_exits_without_a_word(start, backend):
    job = start(4, FOR_EVER, "leave-exit", 1, backend)
    for rank, end in enumerate(job.ends([0, 1, 2, 3], within_s=SOON_S)):
        assert end.code == (0 if rank == 1 else 7)
        assert rank == 1 or end.error.startswith("rank 1 left the job while rank"), end


@both
def test_a_job_in_which_nothing_goes_wrong_ends_without_a_word(start, backend):
    job = start(3, 8, "none", 0, backend)
    assert [(end.code, end.error) for end in job.ends([0, 1, 2], within_s=SOON_S)] == [(0, "")] * 3


# -- harm at other moments than in the midst of training ---------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "culprit", "harm", "backend"),
    [
        ("meeting", 1, "exception", "all-reduce"),
        ("handshake", 0, "KILL", "all-reduce"),
        ("groups", 1, "STOP", "all-reduce"),
        ("servers", 1, "KILL", "server"),
        ("measuring", 0, "KILL", "both"),
        ("first decision", 0, "STOP", "all-reduce"),
        ("opening lanes", 1, "KILL", "server"),
        ("switch", 1, "exception", "both"),
        ("a forked worker lives on", 1, "KILL", "all-reduce"),
        ("closing", 0, "KILL", "all-reduce"),
    ],
)
def test_harm_to_one_rank_is_named_by_all_others_soon_at_every_moment(server, tmp_path, phase, culprit, harm, backend):
    ends = harmed(server, tmp_path, phase, culprit, harm, backend, within_s=SOON_S)
    assert ends
    for end in ends.values():
        assert is_named(end, culprit, harm, phase), end


# -- ranks that disagree -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "first"),
    [
        ("shape", r"tensor 7: layers.0.weight of [40, 12] torch.float32 on rank 0"),
        ("dtype", r"tensor 0: layers.3.bias of [6] torch.float32 on rank 0"),
        ("name", r"tensor 0: layers.3.bias of [6] torch.float32 on rank 0"),
        ("count", r"the number of tensors: 8 on rank 0"),
        ("buffer", r"the number of buffers: 0 on rank 0"),
        (
            "policy",
            r"policy: ByteScheduler(partition_bytes=1048576, credit_bytes=4194304, pulls='priority', until='sent') on rank 0",
        ),
        (
            "knob",
            r"policy: ByteScheduler(partition_bytes=1048576, credit_bytes=4194304, pulls='priority', until='sent') on rank 0",
        ),
        ("backend", r"backend: all-reduce on rank 0"),
        ("order", r"order: planned on rank 0"),
        ("optimizer", r"optimizers: ('SGD',) on rank 0"),
        ("option", r"options: {'broadcast_buffers': True} on rank 0"),
    ],
)
def test_ranks_that_disagree_all_hear_of_the_first_difference_at_attach(two_ranks, difference, first):
    outcomes = two_ranks.run("tests.live.faults:attach_differently", difference=difference)
    assert outcomes[0] == outcomes[1]
    kind, text = outcomes[0]
    assert kind == "MismatchError"
    assert text.startswith(f"ranks disagree on {first}")
    assert "on rank 1" in text
    assert text.endswith("start every rank with the same script, options and model")


@pytest.mark.parametrize(("missing", "says"), [(1, "missing: [1]"), (0, "no word from rank 0 within 1 s; it never called")])
def test_a_rank_that_never_attaches_is_named_at_the_timeout(two_ranks, missing, says):
    kind, text, seconds = two_ranks.run("tests.live.faults:attach_on_one_rank", missing=missing)[1 - missing]
    assert kind == "MismatchError"
    assert says in text
    assert seconds < 15


def test_a_job_waits_as_long_as_its_process_group_unless_attach_is_given_a_timeout(two_ranks):
    for waits, given, alone in two_ranks.run("tests.live.faults:timeouts"):
        assert (waits, given) == (77.0, 5.0)
        assert alone > 0


# -- an order that was not agreed ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["swap", "hash"])
def test_another_order_on_one_rank_ends_in_an_error_on_both_and_in_no_wrong_sum(fault):
    ranks = Ranks(2)  # of its own: sums are left half done
    try:
        outcomes = ranks.run("tests.live.faults:another_order", fault=fault)
    finally:
        ranks.close()
    for kind, text, wrong, seconds in outcomes:
        assert kind == "OrderError"
        assert ("nothing was sent" if fault == "swap" else "issued the messages of iteration 5 in different orders") in text
        assert wrong == []
        assert seconds < 15


# -- parameters of two steps ----------------------------------------------------------------------------------


@both
def test_what_a_failed_job_has_not_updated_refuses_to_be_read_until_a_checkpoint_is_loaded(backend):
    ranks = Ranks(2)  # of its own: the job fails
    try:
        found, _ = ranks.run("tests.live.faults:left_between_two_steps", backend=backend)
    finally:
        ranks.close()
    assert found["updated"]
    told = ["layers.0.weight", "optimizer", "state", "state_dict"]
    for reads in found["open"]:
        assert set(told) <= set(reads)
        assert "layers.3.bias" not in reads
        assert set(reads.values()) == {"PeerFailed: rank 1 failed: LookupError: by the test"}
    for reads in found["closed"]:
        assert list(reads) == list(found["open"][0])
        assert reads["layers.0.weight"].startswith("JobError: layers.0.weight lacks its update of the last step")
        assert reads["state"].startswith("JobError: the state of SGD lacks its update of the last step")
        assert all("(rank 1 failed: LookupError: by the test)" in text for text in reads.values())
    assert [text for text in found["others"].values() if "load a checkpoint" not in text] == []
    assert found["mended"] == []
    assert found["classes"] == ["Parameter", "SGD"]


@both
@pytest.mark.parametrize("end", ["an exception", "Ctrl-C", "sys.exit", "a generator that is closed"])
def test_whoever_leaves_the_with_block_by_an_exception_between_two_steps_has_all_updates(backend, end):
    ranks = Ranks(2)  # of its own: each job uses one key of the store
    try:
        outcomes = ranks.run("tests.live.faults:leaves_its_block", backend=backend, end=end, alone=False)
    finally:
        ranks.close()
    for deferred, wrong, _ in outcomes:
        assert deferred > 0
        assert wrong == []


@both
def test_who_trains_on_after_that_is_told_of_the_exception(backend):
    ranks = Ranks(2)  # of its own: the job fails
    try:
        (_, _, told), (_, wrong, _) = ranks.run(
            "tests.live.faults:leaves_its_block", backend=backend, end="an exception", alone=True
        )
    finally:
        ranks.close()
    assert told == "PeerFailed: rank 1 failed: LookupError: by the test"
    assert wrong == []


# -- exceptions that have no caller ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["_leave", "scatter"])
def test_an_exception_in_a_callback_of_torch_ends_the_job_at_once_with_its_own_traceback(method):
    ranks = Ranks(2)  # of its own: sums are left half done
    try:
        other, culprit = ranks.run("tests.live.faults:raises_in_a_callback", method=method)
    finally:
        ranks.close()
    for kind, text, _, seconds in (other, culprit):
        assert (kind, text) == ("PeerFailed", "rank 1 failed: LookupError: by the test")
        assert seconds < 5
    assert culprit[2] == "LookupError('by the test')"


# -- strangers, and what is left behind ------------------------------------------------------------------------


def test_junk_on_the_control_port_does_not_disturb_the_job(two_ranks):
    outcomes = two_ranks.run("tests.live.faults:junk_on_the_control_port")
    for wrong, _ in outcomes:
        assert wrong == []
    refused = outcomes[1][1]
    assert refused == {"random": True, "http": True, "huge": True, "version": True, "token": True, "rank": True, "twice": True}


@both
def test_a_closed_session_leaves_no_thread_no_descriptor_and_no_hook(two_ranks, backend):
    for before, after, hooks in two_ranks.run("tests.live.faults:attach_and_close_often", backend=backend):
        assert {what: count for what, count in after.items() if count > before[what]} == {}
        assert hooks == []


def test_a_rank_that_leaves_while_it_attaches_is_named_to_the_others():
    ranks = Ranks(2)  # of its own: rank 0's session has failed
    try:
        said = ranks.run("tests.live.faults:leave_in_attach")
    finally:
        ranks.close()
    assert said[1] == "SystemExit: 143"
    assert said[0].startswith("PeerFailed: ")
    assert "rank 1 failed: SystemExit: 143" in said[0]


def test_attach_returns_on_no_rank_before_all_have_their_connections(two_ranks):
    (_, returned_at), (made_at, _) = two_ranks.run("tests.live.faults:connect_late")
    assert returned_at > made_at
