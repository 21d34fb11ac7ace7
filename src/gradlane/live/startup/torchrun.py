"""Calls torchrun, for `gradlane launch` within its process and for other commands in one of its own:

    python -m gradlane.live.startup.torchrun [TORCHRUN OPTIONS] SCRIPT [ARGS]...

Both end with one line where torchrun has a page of logs and a traceback.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys

from torch.distributed import run as _torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from gradlane.errors import GradlaneError, InputError, JobError


def arguments() -> argparse.ArgumentParser:
    """torchrun's argument parser."""
    return _torchrun.get_args_parser()


def run(given: argparse.Namespace) -> int:
    """Start the ranks and wait for them.

    Args:
        given: torchrun's parsed arguments.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that ended torchrun.

    Raises:
        InputError: torchrun refuses an option.
        JobError: a rank failed; names the first one.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    # its warnings are of signals only: that one came, and to which rank it goes
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    try:
        _torchrun.run(given)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
        raise JobError(f"rank {rank} {how}, the first of {len(error.failures)} to fail; its own output says why") from None
    except ValueError as error:
        raise InputError(f"torchrun: {error}; see torchrun --help") from error
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(run(arguments().parse_args()))
    except GradlaneError as error:
        sys.exit(f"gradlane: {error}")
