"""System calls that Python 3.10 lacks, by ctypes: unshare, setns, mount, umount2.

Each raises `LabError` with the call, its argument and the kernel's errno.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from gradlane import lifetime
from gradlane.errors import LabError

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2

_NAMESPACES = {
    CLONE_NEWUSER: "user",
    CLONE_NEWPID: "PID",
    CLONE_NEWNS: "mount",
    CLONE_NEWNET: "network",
    CLONE_NEWUTS: "UTS",
}

WHAT_STILL_WORKS = "without a lab, `gradlane launch` and `gradlane compare --loopback` still run, on bare unshaped loopback"

_libc = ctypes.CDLL(None, use_errno=True)


def refused(what: str, error: OSError | int, advice: str = "") -> LabError:
    """The `LabError` for what the kernel refused.

    Args:
        what: the operation.
        error: its errno or exception.
        advice: what to do.
    """
    number = error if isinstance(error, int) else (error.errno or 0)
    name = f"{os.strerror(number)}, errno {number}" if number else str(error)
    return LabError(f"the kernel refused {what} ({name}){advice and '; ' + advice}; {WHAT_STILL_WORKS}")


def _call(name: str, what: str, *arguments: Any, advice: str = "") -> None:
    function = getattr(_libc, name, None)
    if function is None:
        raise LabError(f"this platform has no {name}(), expected Linux; {WHAT_STILL_WORKS}")
    if function(*arguments) != 0:
        raise refused(f"{name}({what})", ctypes.get_errno(), advice)


def unshare(flags: int) -> None:
    """Leave the namespaces given by `flags` for new ones."""
    kinds = ", ".join(name for flag, name in _NAMESPACES.items() if flags & flag)
    advice = ""
    if flags & CLONE_NEWUSER:
        advice = (
            "expected leave to make user namespaces; see user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns, and the seccomp profile of a container"
        )
    _call("unshare", f"new {kinds} namespace", flags, advice=advice)


def setns(namespace_fd: int, kind: int) -> None:
    """Enter the namespace that `namespace_fd` holds open."""
    _call("setns", f"{_NAMESPACES[kind]} namespace", namespace_fd, kind)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    call = [os.fsencode(text) for text in (source, target, kind)]
    _call("mount", f"{kind or source} on {target}", *call, ctypes.c_ulong(flags), os.fsencode(data))


def unmount(target: str) -> None:
    """Remove the topmost mount on `target`; bind mounts of its files stay."""
    _call("umount2", target, os.fsencode(target), _MNT_DETACH)


def die_with_parent() -> None:
    """As `lifetime.die_with_parent`, with this package's error."""
    try:
        lifetime.die_with_parent()
    except OSError as error:
        raise refused("prctl(PR_SET_PDEATHSIG)", error) from error


def become_root_of_new_user_namespace(flags: int) -> None:
    """Create a user namespace in which the caller's uid is 0, and the namespaces in `flags`.

    Outside, the caller keeps its uid, so files that it creates belong to it. The process must have
    one thread.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | flags)
    # without "deny" an unprivileged process may not write gid_map (user_namespaces(7))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        path = Path("/proc/self") / name
        try:
            path.write_text(text)
        except OSError as error:
            raise refused(f"writing {text!r} to {path}", error) from error
