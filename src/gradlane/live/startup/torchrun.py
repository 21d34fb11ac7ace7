"""Calls torchrun for `gradlane launch`."""

from __future__ import annotations

import argparse

from torch.distributed import run as _torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from gradlane.errors import JobError


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
        JobError: a rank failed; names the first one.
    """
    try:
        _torchrun.run(given)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
        raise JobError(f"rank {rank} {how}, the first of {len(error.failures)} to fail; its own output says why") from None
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 130
    return 0
