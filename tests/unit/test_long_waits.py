"""What is said of long waits while every rank answers, and until when a job waits."""

from __future__ import annotations

from gradlane.live.comm.control_actions import Send, Warn
from gradlane.live.comm.control_frames import Frame
from gradlane.live.comm.control_protocol import ControlProtocol
from gradlane.live.comm.long_waits import REPORT_S, SAY_S, LongWaits, Timer


def test_a_timer_is_due_once_an_interval() -> None:
    timer = Timer(100.0, 60.0)
    due = [now for now in range(100, 400, 7) if timer.due(float(now)) is not None]
    assert due == [163, 226, 289, 352]
    assert timer.left_s(352.0) == 60.0


def lines_of(waits: LongWaits, reporters: dict[int, float], until: float) -> dict[float, str]:
    """What is said until then, by time, where each of these ranks has waited since a time, and reports it."""
    said = {}
    for now in range(int(until)):
        for rank, began in reporters.items():
            if now > began and (now - began) % REPORT_S == 0:
                waits.report(rank, now - began, f"the sums of iteration {rank}", float(now))
        if (line := waits.line(float(now))) is not None:
            said[float(now)] = line
    return said


def test_whoever_does_not_wait_is_the_one_that_the_others_wait_for() -> None:
    said = lines_of(LongWaits(range(3), 1800.0), {1: 10.0, 2: 13.0}, 200.0)
    assert list(said) == [10 + SAY_S, 10 + 2 * SAY_S, 10 + 3 * SAY_S]
    assert said[70.0] == (
        "ranks [1, 2] have waited for rank 0 for 60 s (the sums of iteration 1); every rank answers, so the job waits on, for "
        "up to 1800 s (timeout=)"
    )


def test_ranks_have_their_numbers_of_the_whole_job() -> None:
    said = lines_of(LongWaits([4, 6, 9], 600.0), {2: 0.0}, 61.0)
    assert said[60.0].startswith("rank 9 has waited for ranks [4, 6] for 60 s (")


def test_where_all_ranks_wait_none_is_named_as_the_one_they_wait_for() -> None:
    said = lines_of(LongWaits(range(2), 600.0), {0: 0.0, 1: 0.0}, 61.0)
    assert said[60.0].startswith("ranks [0, 1] have waited for 60 s (")


def test_nothing_is_said_of_short_waits_nor_of_one_that_is_over() -> None:
    waits = LongWaits(range(2), 1800.0)
    assert not lines_of(waits, {1: 0.0}, SAY_S)
    assert waits.line(SAY_S + REPORT_S) is None  # it has reported nothing since


def test_rank_0_hears_of_waits_and_says_a_line() -> None:
    rank_0: ControlProtocol[str] = ControlProtocol(0, range(2), 1800.0, 2.5, 0.0)
    rank_1: ControlProtocol[str] = ControlProtocol(1, range(2), 1800.0, 2.5, 0.0)
    rank_0.accept("its connection")
    rank_0.came("its connection", [(Frame.HELLO, 1, rank_0.token_for(1).encode())], 0.0)
    rank_1.connected("to rank 0")
    (sent,) = [action for action in rank_1.waits(SAY_S, "rank 0's decision", 70.0) if isinstance(action, Send)]
    rank_0.came("its connection", [(sent.frame, sent.rank, sent.payload)], 70.0)
    (line,) = [action.text for action in rank_0.time_is(70.0) if isinstance(action, Warn)]
    assert line.startswith("rank 1 has waited for rank 0 for 60 s (rank 0's decision); every rank answers")
    assert not [action for action in rank_0.time_is(71.0) if isinstance(action, Warn)]


def test_rank_0_that_came_last_names_nobody_missing_who_has_waited_for_it() -> None:
    rank_0: ControlProtocol[str] = ControlProtocol(0, range(3), 30.0, 2.5, 0.0)
    rank_0.give_up_waiting("10.0.0.1", {1, 2})
    assert str(rank_0.failure) == (
        "1 of 3 ranks called gradlane.attach within 30 s; ranks [1, 2] had called it before and waited for rank 0 in vain, "
        "which came too late"
    )
