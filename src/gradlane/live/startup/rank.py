"""The main module of each rank that torchrun starts here: `python -m gradlane.live.startup.rank MODULE [ARGS]...`

It sees to it that the rank ends with torchrun, and then runs MODULE as `python -m` would. Importing torch takes seconds, in
which torchrun may be killed, so this comes before any of that.

A rank that ends because another has failed writes that down, as `torch.distributed.elastic`'s `record` would: torchrun then
knows that it is not to blame.
"""

from __future__ import annotations

import runpy
import sys

from gradlane.errors import PeerError
from gradlane.lifetime import end_with_starter

if __name__ == "__main__":
    end_with_starter()
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except PeerError as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        raise
