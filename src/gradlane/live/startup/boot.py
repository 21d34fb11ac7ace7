"""The main module of each process of `gradlane launch`: reads the launcher's options, then runs the
script.

Options of the command line win over what the script passes to `attach`, so that one script can be
tried under many policies. A script that never calls `attach` runs unchanged; with `--ddp` its
DistributedDataParallel is gradlane's.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

import gradlane
from gradlane.core.launch_options import LaunchOptions
from gradlane.errors import GradlaneError, InputError
from gradlane.live.startup import rendezvous
from gradlane.live.startup.options import set_launched


def main(arguments: list[str]) -> None:
    """Run the script `arguments[0]`; the others are its arguments. Exits with a message if it
    cannot be run.
    """
    try:
        options = LaunchOptions.from_environment(os.environ)
        set_launched(options)
        script = arguments[0]
        if not Path(script).is_file():
            raise InputError(f"script: got {script!r}, expected a Python file")
    except GradlaneError as error:
        sys.exit(f"gradlane: {error}")
    dist.init_process_group = rendezvous.init_process_group  # type: ignore[assignment]
    if options.ddp:
        gradlane.replace_ddp()
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
