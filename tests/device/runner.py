"""Runs checks on real ranks, several at a time, each within a limit.

Each of some threads has ranks of its own, which stay up from one check to the next: starting a rank on a
device takes seconds. After anything but a clean answer they are ended and others started.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tests.device.catalog import Check
from tests.device.deadline import Deadline
from tests.device.machine import Setup
from tests.device.results import Results, Row
from tests.live.ranks import Ranks

START_S = 45.0  # more for a check that has to start ranks, which open a device meanwhile
HURRY_S = 10.0  # for the others, once a rank has failed
Answer = tuple[bool, Any] | None


def judge(check: Check, answers: Sequence[Answer], limit_s: float, cut: bool = False) -> tuple[str, str]:
    """The outcome of a check, and the reason or a remark.

    Args:
        answers: of each rank (ok, value), where a value that is not ok is (kind, text, traceback); None where there
            was none in time.
        limit_s: that the check had.
        cut: less than it should have had.
    """
    remarks = []
    failures, silent = [], []
    for rank, answer in enumerate(answers):
        if answer is None:
            silent.append(f"rank {rank}: no answer within {limit_s:.0f} s")
            continue
        ok, value = answer
        if ok:
            remarks += [value] if value else []
        elif value[0] == "Skip":
            return "skipped", value[1]
        elif not (check.dies and rank == len(answers) - 1 and value[0] == "ProcessEnded"):
            failures.append(f"rank {rank}: {value[0]}: {value[1]}\n{value[2]}".rstrip())
    if silent and not failures and cut:
        return "left out", f"{limit_s:.0f} s were left"
    if failures or silent:
        return "failed", "\n".join([*failures, *silent])
    return "passed", "; ".join(dict.fromkeys(remarks))


def run(checks: Sequence[Check], results: Results, deadline: Deadline, jobs: int) -> None:
    """Make all checks that there is time for; `results` gets a row for each."""
    waiting, lock = deque(checks), threading.Lock()

    def next_of(setups: Sequence[Setup]) -> Check | None:
        """One of those whose ranks are up, before others."""
        with lock:
            if not waiting:
                return None
            ready = (check for check in waiting if check.setup in setups and not check.apart)
            # those apart are long: they go first
            check = waiting[0] if waiting[0].apart else next(ready, waiting[0])
            waiting.remove(check)
            return check

    threads = [threading.Thread(target=_work, args=(next_of, results, deadline), daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(next_of: Callable[[Sequence[Setup]], Check | None], results: Results, deadline: Deadline) -> None:
    seats: dict[Setup, Ranks] = {}
    try:
        while (check := next_of(list(seats))) is not None:
            began = time.monotonic()
            try:
                outcome, reason = _make(check, seats, deadline)
            except Exception:  # of a process that cannot be started, say; the others go on
                outcome, reason = "failed", traceback.format_exc()
                _drop(seats.pop(check.setup, None))
            setup = check.setup
            took_s = round(time.monotonic() - began, 2)
            results.add(Row(check.family, check.name, check.carrier, setup.group, setup.ranks, outcome, took_s, reason))
    finally:
        for ranks in seats.values():
            _drop(ranks)


def _make(check: Check, seats: dict[Setup, Ranks], deadline: Deadline) -> tuple[str, str]:
    setup = check.setup
    if deadline.left_s == 0:
        return "left out", f"the limit of {deadline.limit_s:g} s for all was over"
    ranks = None if check.apart else seats.get(setup)
    wanted_s = check.limit_s if ranks is not None else check.limit_s + START_S
    limit_s = deadline.limit_of(wanted_s)
    if ranks is None:
        ranks = Ranks(setup.ranks, setup.group, multiprocessing.get_context("spawn"), setup.environments)
        if not check.apart:
            seats[setup] = ranks
    try:
        answers = ranks.answers(
            "tests.device.checks:run",
            limit_s,
            lambda answer: None if answer[0] else HURRY_S,
            check=check.function,
            device=setup.device,
            backend=check.carrier,
            stand_in=setup.stand_in,
            arguments=check.arguments,
        )
    finally:
        if check.apart:
            _drop(ranks)
    if not check.apart and not all(answer is not None and (answer[0] or answer[1][0] == "Skip") for answer in answers):
        _drop(seats.pop(setup))  # a collective may be half done
    return judge(check, answers, limit_s, limit_s < wanted_s)


def _drop(ranks: Ranks | None) -> None:
    if ranks is not None:
        ranks.kill()
        ranks.close()
