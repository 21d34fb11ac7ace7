"""Phases: what becomes of a trained parameter in an iteration, as one table.

A parameter goes round: its gradient is produced, sent, summed and used, and so on. What may happen to it
depends on where it is. `TABLE` has each phase, each event that may come in it, and the phase that follows
or the error that ends the job. An event that is not listed cannot come; if it does, that is a fault of
gradlane's and raises an AssertionError.

        begin       gradient      send      end        step
    CURRENT --> OPEN --> PRODUCED --> SENT --> AWAITED --> CURRENT
                  |                              ^  |
                  `----------- ABSENT -----------'  `--> DEFERRED --> CURRENT
                     lack               end         defer           update

Who may see what in which phase is in `updates.py`. Neither file knows of torch: `tests/unit/test_updates.py`
runs both with threads, forks and signals that come between any two lines.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """Where a parameter is."""

    CURRENT = 0
    """Its value is that of the last step, and no backward pass runs."""
    OPEN = 1
    """A backward pass runs, which has not produced its gradient."""
    UNREAD = 2
    """As `OPEN`; and no forward pass before can have read its value, since its update was still deferred."""
    PRODUCED = 3
    """Its gradient is complete, and waits for its neighbours."""
    SENT = 4
    """Its gradient is on its way, and the backward pass goes on."""
    ABSENT = 5
    """The backward pass has ended without a gradient of it on this rank; those of other ranks are on their way."""
    AWAITED = 6
    """The backward pass is over. The sum has arrived, or whoever reads the gradient waits for it."""
    DEFERRED = 7
    """`step()` has returned without its update, which comes with its first use. It is guarded."""
    LOST = 8
    """The job has failed, and its update will not come. It refuses to be read."""


class Event(IntEnum):
    """What happens to a parameter."""

    BEGIN = 0
    """A backward pass begins, whose gradients are summed."""
    BEGIN_UNREAD = 1
    """The same; its update had still been deferred."""
    GRADIENT = 2
    """Autograd has completed its gradient."""
    SEND = 3
    """Its gradient is in its slot, and the carrier has been told."""
    LACK = 4
    """The backward pass has ended without its gradient."""
    END = 5
    """The backward pass is over."""
    READ = 6
    """Its gradient is read, which stands for a sum."""
    STEP = 7
    """An optimizer that has it steps."""
    DEFER = 8
    """An optimizer steps, and its gradient is hidden from it."""
    UPDATE = 9
    """Its deferred update has been made."""
    ABANDON = 10
    """The optimizer has raised in the `step()` that was to defer its update."""
    LOSE = 11
    """The job has failed, or the session is closed."""


_STEP_INSIDE = (
    "optimizer.step() for {name} inside the backward pass, before its gradient could be summed: call it after backward()"
)
TWICE = (
    "the gradient of {name} arrived {fired} times in one backward pass, expected {expected}; use "
    "checkpoint(use_reentrant=False), and one backward pass a step"
)
_READ_TOO_EARLY = (
    "{name} was read before its update had been made, by something that Python does not see (a C++ extension?): put it into a "
    "module of its own and pass cross_barrier=False to gradlane.attach"
)
_READ_INSIDE = (
    "the gradient of {name} is read, or accumulated into once more, after it was sent and before the backward pass has ended; "
    "use checkpoint(use_reentrant=False), and read gradients after backward(). If the script has caught an error of "
    "backward(), the job cannot go on from here: gradients are partly summed"
)

Row = dict[Event, "Phase | str"]

TABLE: dict[Phase, Row] = {
    Phase.CURRENT: {
        Event.BEGIN: Phase.OPEN,
        Event.BEGIN_UNREAD: Phase.UNREAD,
        Event.END: Phase.CURRENT,
        Event.READ: Phase.CURRENT,
        Event.STEP: Phase.CURRENT,
        Event.LOSE: Phase.CURRENT,
    },
    Phase.OPEN: {
        Event.GRADIENT: Phase.PRODUCED,
        Event.LACK: Phase.ABSENT,
        Event.READ: Phase.OPEN,
        Event.STEP: _STEP_INSIDE,
        Event.LOSE: Phase.CURRENT,
    },
    Phase.UNREAD: {
        Event.GRADIENT: _READ_TOO_EARLY,
        Event.LACK: Phase.ABSENT,
        Event.READ: Phase.UNREAD,
        Event.STEP: _STEP_INSIDE,
        Event.LOSE: Phase.CURRENT,
    },
    Phase.PRODUCED: {
        Event.GRADIENT: TWICE,
        Event.SEND: Phase.SENT,
        Event.READ: Phase.PRODUCED,
        Event.STEP: _STEP_INSIDE,
        Event.LOSE: Phase.CURRENT,
    },
    Phase.SENT: {
        Event.GRADIENT: TWICE,
        Event.END: Phase.AWAITED,
        Event.READ: _READ_INSIDE,
        Event.STEP: _STEP_INSIDE,
        Event.LOSE: Phase.CURRENT,
    },
    Phase.ABSENT: {
        Event.END: Phase.AWAITED,
        Event.READ: Phase.ABSENT,
        Event.STEP: _STEP_INSIDE,
        Event.LOSE: Phase.CURRENT,
    },
    Phase.AWAITED: {
        Event.BEGIN: Phase.OPEN,  # no optimizer has stepped
        Event.READ: Phase.AWAITED,
        Event.STEP: Phase.CURRENT,
        Event.DEFER: Phase.DEFERRED,
        Event.LOSE: Phase.CURRENT,
    },
    Phase.DEFERRED: {
        Event.READ: Phase.DEFERRED,  # the update is made first
        Event.UPDATE: Phase.CURRENT,
        Event.ABANDON: Phase.AWAITED,
        Event.LOSE: Phase.LOST,
    },
    Phase.LOST: {},
}
# by number of the event and of the phase: what follows, or None for what cannot come
FOLLOWS: list[list[Phase | str | None]] = [[TABLE[phase].get(event) for phase in Phase] for event in Event]


class NotAllowedError(Exception):
    """The script has done what ends the job; the text says what, with `{name}`, `{fired}` and `{expected}` left open."""
