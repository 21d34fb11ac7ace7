"""What commands print: a full disk is an `OutputError`, as it is for the files that they write (`core.files.writing`)."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

from gradlane.errors import OutputError

# of a write to an open stream, which has no file's name: no space, over a quota or a limit, and a device that fails
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Raise `OutputError` where what is printed meanwhile on stdout cannot be written, and give up on stdout then.

    A closed pipe is none: click ends the command without a word, as others do. A letter that stdout's encoding lacks is
    printed as "?", which leaves JSON what it is.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _NOT_WRITTEN:
            raise
        with contextlib.suppress(OSError, ValueError):
            # what is left in the buffer would fail again when the interpreter ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"stdout: got no space for it ({error.strerror}), expected to print; print elsewhere") from error
