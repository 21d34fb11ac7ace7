"""Log: what a Dispatcher was told, iteration after iteration, and what it answered; see `schedule.log`."""

from __future__ import annotations

from typing import Literal

import msgspec

from gradlane.core.plan import Plan

What = Literal["begin", "ready", "finished", "allow"]
"""The method of the Dispatcher that was called."""


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Something that a Dispatcher was told, and what it answered.

    Args:
        what: the method that was called.
        subject: the tensor that is ready, else the message; -1 where an iteration begins.
        starts: the messages to start now, in order.
    """

    what: What
    subject: int
    starts: tuple[int, ...]


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whole iterations of one Dispatcher; the last one may be under way.

    Args:
        plan: what the Dispatcher carried out.
        facts: in the order in which it was told them.
        follow: whether a coordinator told it the order of messages.
    """

    plan: Plan
    facts: tuple[Fact, ...]
    follow: bool = False
