"""Calls torchrun, for `gradlane launch` within its process and for other commands in one of its own:

    python -m gradlane.live.startup.torchrun [TORCHRUN OPTIONS] -m MODULE [ARGS]...

Both end with one line where torchrun has a page of logs and a traceback.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed import run as _torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gradlane.errors import GradlaneError, InputError, PeerError, RunError
from gradlane.lifetime import exit_code_of, interruptible, scratch_folder, signal_of, starter

_PEER_ERRORS = tuple(f"{each.__name__}:" for each in PeerError.__subclasses__())
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # for which torchrun may put handlers


def arguments() -> argparse.ArgumentParser:
    """torchrun's argument parser."""
    return _torchrun.get_args_parser()


def run(given: argparse.Namespace) -> int:
    """Start the ranks and wait for them.

    Args:
        given: torchrun's parsed arguments, of a module.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that ended torchrun.

    Raises:
        InputError: torchrun refuses an option.
        RunError: a rank failed; names the first one, but for ranks that failed because of another, and has its exit code.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    # its warnings are of signals only: that one came, and to which rank it goes
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    try:
        with _of_this_run(given):
            _torchrun.run(given)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        raise failure_of(error.failures) from None
    except ValueError as error:
        raise InputError(f"torchrun: {error}; see torchrun --help") from error
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return 128 + int(error.sigval)
    return 0


def failure_of(failures: Mapping[int, ProcessFailure]) -> RunError:
    """Which rank has failed, or, where those seen here have failed because of another, what they were told of it.

    Args:
        failures: by rank. `rank.py` has written down the error of a rank that failed because of another.
    """
    follows = {rank: text for rank, failure in failures.items() if (text := _error_of(failure)).startswith(_PEER_ERRORS)}
    # torchrun ends all ranks when one has ended, also the one that has failed first and still prints its error
    told = tuple(follows.values())
    ended = {
        rank
        for rank, failure in failures.items()
        if failure.exitcode == -signal.SIGTERM and any(text.startswith(f"PeerFailed: rank {rank} ") for text in told)
    }
    rank = min(failures, key=lambda each: (each in follows or each in ended, each in ended, failures[each].timestamp))
    failure = failures[rank]
    exit_code = exit_code_of(failure.exitcode)
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
    if rank in follows:
        return RunError(f"rank {rank} {how}: {follows[rank]}", exit_code)
    why = "its own output says why"
    if failure.exitcode == -signal.SIGKILL:
        why = "a process that is killed says nothing; Linux kills one where memory runs out"
    return RunError(f"rank {rank} {how}, the first of {len(failures)} to fail; {why}", exit_code)


def _error_of(failure: ProcessFailure) -> str:
    """Class and text of the exception that a rank has written down; else what torchrun says of it."""
    message: Any = failure.message  # torch's own handler writes more than text
    return str(message["message"] if isinstance(message, dict) else message)


@contextmanager
def _of_this_run(given: argparse.Namespace) -> Iterator[None]:
    """Have ranks end with this process, and what torchrun leaves behind go: its folder and its handlers of signals."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS if is_main}
    assert given.module
    given.training_script_args = [given.training_script, *given.training_script_args]
    given.training_script = "gradlane.live.startup.rank"
    with ExitStack() as stack, starter():
        if given.log_dir is None and _writes_no_logs(given):
            given.log_dir = stack.enter_context(scratch_folder())
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _writes_no_logs(given: argparse.Namespace) -> bool:
    return str(given.redirects) == str(given.tee) == "0"


if __name__ == "__main__":
    try:
        with interruptible():
            sys.exit(run(arguments().parse_args()))
    except KeyboardInterrupt as interrupt:  # the command that started this process says so
        sys.exit(128 + signal_of(interrupt))
    except GradlaneError as error:
        print(f"gradlane: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, RunError) else 1)
