"""The main module of each process of `gradlane launch`: reads the launcher's options, then runs the
script.

Options of the command line win over what the script passes to `attach`, so that one script can be
tried under many policies. A script that never calls `attach` runs unchanged; with `--ddp` its
DistributedDataParallel is gradlane's.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

# Ctrl-C needs no traceback of each rank, which the script has not reached
_INTERRUPT = signal.getsignal(signal.SIGINT)
if _INTERRUPT is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gradlane  # noqa: E402
from gradlane.core.launch_options import LaunchOptions  # noqa: E402
from gradlane.errors import GradlaneError, InputError  # noqa: E402
from gradlane.live.startup import children, lifecycle  # noqa: E402
from gradlane.live.startup.launched import has_attached  # noqa: E402

_kept: dict[str, Any] = {}
"""What the script has left. It goes when the process ends, as without a launcher. Where it went before that, torch's DDP
hung in 2 of 9 jobs whose process group was gone, on a busy machine; kept until the end it hung in none of 16.
"""


def main(arguments: list[str]) -> None:
    """Run the script `arguments[0]`; the others are its arguments. Exits with a message if it
    cannot be run.
    """
    try:
        options = LaunchOptions.from_environment(os.environ)
        script = arguments[0]
        if not Path(script).is_file():
            raise InputError(f"script: got {script!r}, expected a Python file")
    except GradlaneError as error:
        sys.exit(f"gradlane: {error}")
    children.prepare(options)
    children.prepare_children(str(Path(script).absolute()))
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    signal.signal(signal.SIGINT, _INTERRUPT)
    try:
        _kept.update(runpy.run_path(script, run_name="__main__"))
    except KeyboardInterrupt as error:
        # the launcher says so, once for all ranks
        lifecycle.fail_all(error)
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        if error.code not in (None, 0):
            lifecycle.leave_all(error)
        raise
    wrapped = gradlane.DistributedDataParallel.made or children.took_part()
    if options.ddp and not wrapped and os.environ.get("RANK") == "0":
        print("gradlane: --ddp had no effect: the script wrapped no model in DistributedDataParallel", file=sys.stderr)
    if options.attached is None and options.of_sessions() and os.environ.get("RANK") == "0" and not has_attached():
        # the launcher has become this process, so that it cannot say so
        print(f"gradlane: {options.without_effect()}", file=sys.stderr)
        sys.exit(int(options.verify))


if __name__ == "__main__":
    main(sys.argv[1:])
