"""Every error that gradlane raises on purpose, as one tree.

    GradlaneError
    |- InputError            a value, file or option is not usable (a ValueError)
    |  |- FormatError        a file cannot be read; `path` names the field
    |  `- PlanError          a plan does not fit its profile, its model or its backend
    |- UnsupportedError      the model, optimizer or platform cannot be served; says why
    |- OutputError           what a command prints, or a file that it writes, cannot be written
    |- LabError              the kernel refused what an emulated cluster needs
    |- UnevenInputsError     a rank has fewer inputs than others, and `join` was to say so (a RuntimeError)
    `- JobError              the ranks of a running job
       |- MismatchError      ranks disagree before step 1; names the first difference
       |- VerificationError  a step gave other values than DDP's
       |- NotFiniteError     a gradient is infinite or NaN; `rank` names where (`check_finite`)
       |- OrderError         a collective was about to be issued outside of the agreed order
       |- PeerError          another rank is gone; `rank` names it
       |  |- PeerDied        its process ended (the kernel closed the connection)
       |  |- PeerStalled     its process lives and sends nothing
       |  `- PeerFailed      it raised an exception and sent its text
       |- AuthError          a process does not know the job's secret
       |- CapacityError      more tensors or bytes were registered than a server agreed to hold
       |- RunError           processes that a command started ended with an exit code other than 0
       `- CommunicationError a collective failed or ran out of time
          |- BarrierError    ranks did not come to a monitored barrier (also a RuntimeError, as torch's)
          `- CorruptError    a checksum on the wire does not match

Each message says what gradlane got, what it expected, and what to do. A broken invariant of
gradlane itself is an `assert`, not one of these.
"""

from __future__ import annotations

import re


class GradlaneError(Exception):
    """Root of the tree: catch this to catch everything that gradlane raises on purpose."""


class InputError(GradlaneError, ValueError):
    """A value, a file or an option is not usable."""


class FormatError(InputError):
    """A file cannot be read.

    Attributes:
        reason: what is wrong with it.
        path: the place in the file, as in ``$.tensors[3].size_bytes``.
    """

    def __init__(self, message: str, path: str = "$") -> None:
        super().__init__(f"{message} (at {path})")
        self.reason = message
        self.path = path

    def of_file(self, file: object) -> FormatError:
        """The same error with the file's name before it."""
        return FormatError(f"{file}: {self.reason}", self.path)


class OutputError(GradlaneError):
    """What a command prints, or a file that it writes, cannot be written."""


class PlanError(InputError):
    """A plan does not fit the profile, the model or the backend that it was handed to."""


class UnsupportedError(GradlaneError):
    """The model, the optimizer or the platform cannot be served; the message says why."""


class LabError(GradlaneError):
    """The kernel refused what an emulated cluster needs."""


class UnevenInputsError(GradlaneError, RuntimeError):
    """A rank has fewer inputs than others. A RuntimeError too, which is what DDP's `join` raises."""


class JobError(GradlaneError):
    """Root of the errors of a running job's ranks."""


class MismatchError(JobError):
    """Ranks disagree about something that must be equal; names the first difference."""


class VerificationError(JobError):
    """A step gave other values than DDP's, as `verify` found (docs/training.md)."""


class NotFiniteError(JobError):
    """A gradient is infinite or NaN, and a parameter was about to be updated with its sum.

    Attributes:
        rank: whose gradient it is.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class OrderError(JobError):
    """A collective was about to be issued outside of the agreed order, and was not."""


class PeerError(JobError):
    """Another process of the job is gone.

    Attributes:
        rank: the rank that is gone; None for a server in a process of its own.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerDied(PeerError):
    """The peer's process ended: the kernel closed its connection."""


class PeerStalled(PeerError):
    """The peer's process lives but has sent nothing for longer than the limit."""


class PeerFailed(PeerError):
    """The peer raised an exception and told the others its text."""


class CommunicationError(JobError):
    """A collective failed or did not finish within its time."""


class BarrierError(CommunicationError, RuntimeError):
    """Ranks did not come to a monitored barrier in time. A RuntimeError too, which is what torch raises there.

    Attributes:
        ranks: of the group, that rank 0 has missed; empty on other ranks.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class CorruptError(CommunicationError):
    """Bytes were damaged on the way: a checksum does not match."""


class AuthError(JobError):
    """A process does not know the job's secret, or a server listens off loopback without one."""


class CapacityError(JobError):
    """More tensors or bytes were registered than a server agreed to hold."""


class RunError(JobError):
    """Processes that a command started ended with an exit code other than 0.

    Attributes:
        exit_code: that exit code, and with it the command's.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    @classmethod
    def of(cls, what: str, exit_code: int) -> RunError:
        """The error of `what`, whose processes have said on their own why they ended."""
        return cls(f"{what} ended with exit code {exit_code}; what went wrong is above", exit_code)


def described(error: BaseException) -> str:
    """An exception in one line: its type, and its text if it has one, as `KeyboardInterrupt` has not."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def told_of(rank: int, how: str, text: str) -> str:
    """What other ranks are told of a rank, which is named once, though the text of its error may begin with its name.

    Args:
        rank: the rank.
        how: what became of it, as "failed".
        text: of its error, perhaps after the error's type.
    """
    if re.match(rf"(transport: )?rank {rank} ", text):
        return text
    named = re.match(rf"(\w+: )?rank {rank}(?:, (?:in )?(attach|iteration \d+))?: ", text)
    if named is None:
        return f"rank {rank} {how}: {text}"
    kind, place = named.groups("")
    return f"rank {rank} {how}{place and f' in {place}'}: {kind}{text[named.end() :]}"
