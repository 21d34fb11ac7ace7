"""The main module of each rank that torchrun starts here: `python -m gradlane.live.startup.rank MODULE [ARGS]...`

It sees to it that the rank ends with torchrun, and then runs MODULE as `python -m` would. Importing torch takes seconds, in
which torchrun may be killed, so this comes before any of that.
"""

from __future__ import annotations

import runpy
import sys

from gradlane.lifetime import end_with_starter

if __name__ == "__main__":
    end_with_starter()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
