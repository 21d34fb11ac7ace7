"""The main module of each process of `gradlane advise`: runs a script with its DistributedDataParallel watched.

python -m gradlane.live.ddp.watch FOLDER STEPS SCRIPT [ARGS]...
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

# Ctrl-C needs no traceback of each rank: the command ends all of them
signal.signal(signal.SIGINT, signal.SIG_DFL)

from gradlane.live.ddp.watched import watch_ddp  # noqa: E402


def main(folder: str, steps: str, *arguments: str) -> None:
    """Run the script `arguments[0]`; the others are its arguments. The rest is for `watch_ddp`."""
    watch = watch_ddp(Path(folder), int(steps))
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    failure: BaseException | None = None
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except BaseException as error:
        failure = error
        raise
    finally:
        if os.environ.get("RANK", "0") == "0":
            watch.say_why_not(failure)


if __name__ == "__main__":
    main(*sys.argv[1:])
