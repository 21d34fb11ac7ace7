"""Defects that gradlane has had, and some that it might have: the simulation has to find each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradlane.errors import JobError, PeerDied, PeerError, PeerStalled
from gradlane.live.comm.control_actions import Action, Drop, Keep
from gradlane.live.comm.control_frames import Cause, Frame
from gradlane.live.comm.control_protocol import ControlProtocol
from gradlane.live.comm.verdict import Verdict
from tests.faults.channel import SimulatedChannel
from tests.faults.job import Ways

Protocol = ControlProtocol[Any]


class QuietWhileItListens(Protocol):
    """Rank 0 sends no beats until all have come, and who has never been heard is silent."""

    def _taken(self) -> list[Action[Any]]:
        if self._rank == 0 and self.missing:
            actions = super()._taken()
            self._actions = [action for action in actions if isinstance(action, Keep)]
            return [*filter(lambda action: not isinstance(action, Keep), actions)]
        return super()._taken()

    def time_is(self, now: float) -> list[Action[Any]]:
        for link in self._links.values():
            link.heard = min(link.heard, now)
        return super().time_is(now)


class SilentOneIsNotTold(Protocol):
    """Who was stopped and continues is not told so, finds its connections closed, and blames rank 0 for it."""

    def _send_failure(self, cause: Cause, culprit: int, text: str, skip: int | None = None) -> None:
        super()._send_failure(cause, culprit, text, culprit if cause is Cause.STALLED else skip)


class KeepsItsOwnConclusion(Protocol):
    """A rank that finds out by itself that another has left early says nothing, and is blamed for its own end."""

    def _fail_with(self, error: BaseException) -> None:
        if not isinstance(error, PeerError):
            super()._fail_with(error)


class NothingForThoseOnTheirWay(Protocol):
    """Who connects when the job has failed already is not told why."""

    def _greet(self, connection: Any, frame: Frame, rank: int, payload: bytes) -> None:
        first, self._first = self._first, None
        super()._greet(connection, frame, rank, payload)
        self._first = first


class ListensAnewForEver(Protocol):
    """Whoever is often late itself never finds out that another is silent."""

    def time_is(self, now: float) -> list[Action[Any]]:
        for link in self._links.values():
            link.is_spared = False
        return super().time_is(now)


class JudgesWhenItWasAway(Protocol):
    """Whoever was stopped itself, with all others, takes them for silent."""

    def time_is(self, now: float) -> list[Action[Any]]:
        if now >= self.look_at:
            self.look_at = now
        return super().time_is(now)


class JudgesBeforeItListens(SimulatedChannel):
    """A beat that has come and has not been read counts as silence."""

    def _turn_once(self, now: float) -> None:
        self._do(self.protocol.time_is(now))
        self._read_all()


class BlamesTheMessenger(Protocol):
    """A closed connection is blamed, although what came on it before had said the cause."""

    def came(self, connection: Any, frames: Sequence[tuple[Frame, int, bytes]], now: float) -> list[Action[Any]]:
        if self._rank == 0:
            return super().came(connection, frames, now)
        return super().came(connection, [frame for frame in frames if frame[0] is not Frame.FAIL], now)


class PassesNothingOn(Protocol):
    """Rank 0 keeps to itself what another rank says of its failure."""

    def _send_failure(self, cause: Cause, culprit: int, text: str, skip: int | None = None) -> None:
        if skip is None:
            super()._send_failure(cause, culprit, text)


class LosesTheNameOfRank0(Protocol):
    """The end of rank 0 closes its connection and says nothing."""

    def ended(self, connection: Any) -> list[Action[Any]]:
        if self._rank != 0:
            self._drop(connection)
            return self._taken()
        return super().ended(connection)


class TakesAnOlderDecision(Protocol):
    """One rank acts on the decision before, if two come at once."""

    def came(self, connection: Any, frames: Sequence[tuple[Frame, int, bytes]], now: float) -> list[Action[Any]]:
        kept: list[tuple[Frame, int, bytes]] = []
        for frame in frames:
            if frame[0] is Frame.DECISION and self._rank == 1:
                before, self.before = getattr(self, "before", frame[2]), frame[2]
                kept.append((frame[0], frame[1], frame[2][:8] + before[8:]))
            else:
                kept.append(frame)
        return super().came(connection, kept, now)


class ReadsOneDecisionOnly(Protocol):
    """Of what comes together, a decision after another frame is not read."""

    def came(self, connection: Any, frames: Sequence[tuple[Frame, int, bytes]], now: float) -> list[Action[Any]]:
        kept = [frame for index, frame in enumerate(frames) if frame[0] is not Frame.DECISION or index == 0]
        return super().came(connection, kept, now)


class ForgetsToDrop(Protocol):
    """A connection of a silent rank is forgotten and stays open."""

    def _look_for_silence(self, now: float) -> None:
        super()._look_for_silence(now)
        self._actions = [action for action in self._actions if not isinstance(action, Drop)]


class LastFailureStands(Verdict):
    """What follows from a failure takes its place."""

    def fail(self, error: JobError) -> None:
        self.failure = error


class WaitsForNoVerdict(Verdict):
    """A collective that fails is the failure at once, before the control channel can name anybody."""

    def suspect(self, error: BaseException, now: float) -> None:
        super().suspect(error, now)
        self._explained_by = now


class BlamesWhoLeft(Verdict):
    """Whoever has left in order is blamed for what a node has lost since."""

    def why_not(self, what: str, now: float) -> JobError:
        if self._left and isinstance(self.suspicion, PeerError):
            self.suspicion = PeerDied("lost", next(iter(self._left)))
        return super().why_not(what, now)


class ForgetsWhyItLeft(Verdict):
    """A rank that leaves because of an exception is held to have come to the end of its script."""

    def left(self, rank: int, why: JobError | None, now: float) -> None:
        super().left(rank, None, now)


class KeepsSilenceToItself(Protocol):
    """A rank whose node finds another one silent ends without a word, and is blamed for its own end."""

    def _fail_with(self, error: BaseException) -> None:
        if not isinstance(error, PeerStalled):
            super()._fail_with(error)


class TellsAtItsEndOnly(Verdict):
    """What a wait has found is told when the script aborts its session, and never if it exits instead."""

    def remaining_s(self, deadline: float, what: str, now: float) -> float:
        self.tell_others = lambda error: None
        return super().remaining_s(deadline, what, now)


def _with(defect: type) -> Ways:
    for base, name in ((SimulatedChannel, "channel"), (Verdict, "verdict")):
        if issubclass(defect, base):
            return Ways(**{name: defect})
    return Ways(protocol=defect)


MUTANTS = {
    each.__name__: _with(each)
    for each in (
        QuietWhileItListens,
        SilentOneIsNotTold,
        KeepsItsOwnConclusion,
        NothingForThoseOnTheirWay,
        ListensAnewForEver,
        JudgesWhenItWasAway,
        JudgesBeforeItListens,
        BlamesTheMessenger,
        PassesNothingOn,
        LosesTheNameOfRank0,
        TakesAnOlderDecision,
        ReadsOneDecisionOnly,
        ForgetsToDrop,
        LastFailureStands,
        WaitsForNoVerdict,
        BlamesWhoLeft,
        ForgetsWhyItLeft,
        KeepsSilenceToItself,
        TellsAtItsEndOnly,
    )
}
