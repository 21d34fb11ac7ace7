"""One emulated host of `gradlane probe --priority`: `python -m gradlane.cli.priority_host SENDERS
SECONDS [--json]`.

Rank 0 listens, and the others send.
"""

from __future__ import annotations

import os
import sys

from gradlane.cli.priority import show
from gradlane.transport import path

PORT = 7000


def main(senders: str, seconds: str, *options: str) -> None:
    """Listen or send on this host, with arguments as on the command line."""
    address = os.environ["MASTER_ADDR"]
    if os.environ["RANK"] == "0":
        show(path.listen(address, PORT, int(senders), float(seconds)), "--json" in options)
    else:
        path.send(address, PORT)


if __name__ == "__main__":
    main(*sys.argv[1:])
