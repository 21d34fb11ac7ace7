"""What a `ControlProtocol` asks whoever drives it to do."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from gradlane.live.comm.control_frames import Frame

Connection = TypeVar("Connection", bound=Hashable)
Subject = Literal["failure", "choice", "left", "decision", "buffers", "not_finite"]


@dataclass(frozen=True)
class Send(Generic[Connection]):
    """A frame to be sent on a connection, as of `rank`."""

    connection: Connection
    frame: Frame
    rank: int
    payload: bytes = b""


@dataclass(frozen=True)
class Keep(Generic[Connection]):
    """The connection is one of this job: beats are to be sent on it from now on, the first at once."""

    connection: Connection


@dataclass(frozen=True)
class Drop(Generic[Connection]):
    """The connection is to be closed. Nothing that comes on it later is a fact."""

    connection: Connection


@dataclass(frozen=True)
class Tell:
    """The session is to hear of something; see `ControlChannel` for what each `about` means."""

    about: Subject
    what: tuple[Any, ...]


@dataclass(frozen=True)
class Warn:
    """A line for the log."""

    text: str


Action = Send[Connection] | Keep[Connection] | Drop[Connection] | Tell | Warn
