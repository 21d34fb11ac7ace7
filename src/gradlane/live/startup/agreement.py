"""Agreement: every rank hands in an entry, rank 0 judges them, and all hear its verdict."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable

from gradlane.errors import MismatchError
from gradlane.live.comm.long_waits import SAY_S, Timer
from gradlane.live.comm.roll_call import RollCall, are_there

log = logging.getLogger("gradlane")

_LOOK_S = (0.005, 0.1)  # between two looks for ranks that have not answered: at first, and at most
_GRACE_S = 5.0  # in which rank 0's verdict comes after its timeout


def settle(
    roll: RollCall,
    entry: bytes,
    judge: Callable[[list[bytes]], str],
    doing: str,
    timeout_s: float,
    ranks: list[int] | None = None,
) -> None:
    """Collect an entry from every rank, have rank 0 judge them, and pass its verdict to all
    (collective; once for each roll call).

    Args:
        roll: of these ranks.
        entry: of this rank.
        judge: called on rank 0 with all entries, by rank; returns "" for agreement, else the
            verdict.
        doing: what a rank does by coming, in the past tense, for the error message.
        timeout_s: seconds to wait for all ranks.
        ranks: numbers of these ranks in the whole job, for the error message; None if they are all.

    Raises:
        MismatchError: with the verdict, or with the ranks that did not come in time.
    """
    named = ranks or list(range(roll.world))
    if roll.rank == 0:
        missing = _missing(roll, time.monotonic() + timeout_s, doing, named)
        if missing:
            left = roll.left(missing)
            names, gone = ([named[each] for each in missing if (each in left) is has_left] for has_left in (False, True))
            verdict = f"{roll.world - len(missing)} of {roll.world} ranks {doing} within {timeout_s:.0f} s"
            verdict += f"; missing: {names}" if names else ""
            verdict += f"; ranks {gone} came before and waited for rank {named[0]} in vain, which came too late" if gone else ""
        else:
            verdict = judge([entry, *(bytes(roll.store.get(f"entry/{other}")) for other in range(1, roll.world))])
        roll.store.set("verdict", verdict)
    else:
        deadline = time.monotonic() + timeout_s + _GRACE_S
        called = roll.wait_to_be_called(timeout_s + _GRACE_S)
        if called:
            roll.store.set(f"entry/{roll.rank}", entry)
        if not called or not are_there(roll.store, ["verdict"], max(0.01, deadline - time.monotonic())):
            raise MismatchError(
                f"rank {named[roll.rank]}: no verdict from rank {named[0]}; it never {doing}, or its process is gone"
            )
        verdict = bytes(roll.store.get("verdict")).decode()
    if verdict:
        raise MismatchError(verdict)


def _missing(roll: RollCall, deadline: float, doing: str, named: list[int]) -> list[int]:
    """Call every rank until it has handed in its entry; returns those that have not by `deadline`."""
    missing, look_s = list(range(1, roll.world)), _LOOK_S[0]
    lines = Timer(time.monotonic(), SAY_S)
    while missing and (left_s := deadline - time.monotonic()) > 0:
        roll.call(missing)
        # a wait of the store that ends by its timeout is two lines in torch's log
        time.sleep(min(look_s, left_s))
        missing = [rank for rank in missing if not roll.store.check([f"entry/{rank}"])]
        look_s = min(2 * look_s, _LOOK_S[1])
        if missing and (waited_s := lines.due(time.monotonic())) is not None:
            names = [named[each] for each in missing]
            log.warning(
                "gradlane: rank %d waits for ranks %s, for %.0f s now: none of them %s", named[0], names, waited_s, doing
            )
    return missing


def whereabouts() -> str:
    """The "host:pid" of this process, for messages that name a rank."""
    return f"{socket.gethostname()}:{os.getpid()}"
