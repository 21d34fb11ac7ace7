"""What this kernel can do for a lab: tries each feature in namespaces that end with the process.

`examine()` starts `python -m gradlane.lab.doctor`, since a process with threads cannot create a
user namespace. Nothing outside changes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gradlane.errors import LabError
from gradlane.lab import awake, kernel
from gradlane.lab.links.relay import open_end
from gradlane.lab.links.shaping import open_routes, shape
from gradlane.lab.spec import LabSpec

_TIMEOUT_SECONDS = 60
_TCP_NOTSENT_LOWAT, _TCP_USER_TIMEOUT, _SO_MAX_PACING_RATE = 25, 18, 47
_ROOT = 0x1_0000
_IPV4 = 0x0800


class Finding(msgspec.Struct, frozen=True):
    """The result of one trial.

    Attributes:
        name, use: what was tried, and what a lab uses it for.
        works: whether it works.
        needed: whether a lab cannot run without it.
        detail: what was found, or why it does not work.
    """

    name: str
    works: bool
    needed: bool
    use: str
    detail: str = ""


def examine() -> tuple[Finding, ...]:
    """Try every feature.

    Raises:
        LabError: not even the trials could be run.
    """
    if sys.platform != "linux":
        raise LabError(f"a lab is made of Linux namespaces, and this is {sys.platform}; {kernel.WHAT_STILL_WORKS}")
    command = [sys.executable, "-m", "gradlane.lab.doctor"]
    done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False)
    try:
        return msgspec.json.decode(done.stdout, type=tuple[Finding, ...])
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise LabError(f"looking at the kernel ended with exit code {done.returncode}: {said}; expected a report") from None


def works(findings: tuple[Finding, ...]) -> bool:
    """Whether a lab can run: all that it needs works."""
    return all(finding.works for finding in findings if finding.needed)


# -- in a process of its own -----------------------------------------------------------------------------------


class _Trial:
    """Collects findings; what is tried returns, perhaps a detail, or raises."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def __call__(self, name: str, use: str, attempt: Callable[[], object], needed: bool = False) -> bool:
        try:
            found = attempt()
            self.findings.append(Finding(name, True, needed, use, found if isinstance(found, str) else ""))
        except Exception as error:
            code = getattr(error, "code", None)
            # without the last clause of a LabError, which advises those who run a lab
            text = os.strerror(code) if isinstance(code, int) else str(error).partition(f"; {kernel.WHAT_STILL_WORKS}")[0]
            self.findings.append(Finding(name, False, needed, use, text or type(error).__name__))
        return self.findings[-1].works


def _examine_here() -> list[Finding]:
    trial = _Trial()
    trial("pyroute2", "speaks to the kernel about links", _pyroute2, needed=True)
    all_kinds = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET
    entered = trial(
        "user, PID, mount and network namespaces", "hosts, without root",
        lambda: kernel.become_root_of_new_user_namespace(all_kinds), needed=True,
    )  # fmt: skip
    if entered and trial.findings[0].works:
        _examine_network(trial)
    _examine_sockets(trial)
    trial("timers", "rates of links, emulated devices", _lateness)
    if trial("processors that do not sleep", "timers on time, on virtual machines above all", awake.stay):
        trial("timers, then", "as they are in a lab", _lateness)
    trial("run delay in schedstat", "emulated devices tell waiting from being preempted", _run_delay)
    trial("memory that goes with its process", "what the lab's init tells", lambda: os.close(os.memfd_create("doctor")), True)
    trial("process descriptors", "ends of ranks", lambda: os.close(os.pidfd_open(os.getpid())), needed=True)
    return trial.findings


def _pyroute2() -> str:
    import pyroute2

    open_routes().close()
    return str(pyroute2.__version__)


def _examine_network(trial: _Trial) -> None:
    with open_routes() as routes:

        def add(name: str, **options: Any) -> None:
            routes.link("add", ifname=name, **options)
            routes.link("set", index=routes.link_lookup(ifname=name)[0], state="up")

        def on(name: str) -> int:
            """A new interface to try something on."""
            add(name, kind="veth", peer=f"{name}p")
            index: int = routes.link_lookup(ifname=name)[0]
            return index

        def discipline(kind: str, **options: Any) -> Callable[[], None]:
            return lambda: routes.tc("add", kind, on(f"q-{kind}"[:13]), _ROOT, **options)

        trial("veth", "links", lambda: add("try", kind="veth", peer="tryp"), needed=True)
        trial("bridge", "the switch", lambda: add("bridge", kind="bridge"), needed=True)
        rate = 125_000_000
        trial("HTB, bfifo", "links of a rate", lambda: shape(routes, on("shaped"), rate, LabSpec(1), "a link"), needed=True)
        trial(
            "HTB with priorities, u32 on DSCP", "strict-priority ports",
            lambda: shape(routes, on("ports"), rate, LabSpec(1, network_classes=8), "a link"),
        )  # fmt: skip

        def flower() -> None:
            index = on("flower")
            routes.tc("add", "htb", index, _ROOT, default=1)
            routes.tc("add-filter", "flower", index, parent=_ROOT, prio=1, protocol=_IPV4, target=_ROOT + 1)

        trial("flower", "not used", flower)

        def packet_socket() -> None:
            on("relay")
            open_end("relay").close()

        trial("packet sockets with virtio headers", "delay and loss", packet_socket)
        trial("netem", "not used", discipline("netem", delay=1000))
        trial("tbf", "not used", discipline("tbf", rate=rate, burst=100_000, latency=10_000))
        trial("fq", "not used", discipline("fq"))
        trial("ifb", "not used", lambda: add("ifb-try", kind="ifb"))
        trial("routes that name cubic", "the congestion control of a lab", lambda: _cubic(routes))


def _cubic(routes: Any) -> str:
    index = routes.link_lookup(ifname="lo")[0]
    routes.link("set", index=index, state="up")
    routes.route("add", dst="10.78.0.0/24", oif=index, metrics={"cc_algo": "cubic"})
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return f"without it, {default}"


def _examine_sockets(trial: _Trial) -> None:
    def option(level: int, number: int, value: int) -> Callable[[], str]:
        def attempt() -> str:
            with socket.socket() as sock:
                sock.setsockopt(level, number, value)
                return f"reads back {sock.getsockopt(level, number)}"

        return attempt

    controls = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    trial("congestion controls", "", lambda: controls.read_text().strip())
    trial("TCP_NOTSENT_LOWAT", "late choice of the next packet", option(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, 65536))
    trial("TCP_USER_TIMEOUT", "noticing dead peers", option(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, 2500))
    trial("SO_MAX_PACING_RATE", "other traffic of a rate", option(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 10**6))
    trial("SO_PRIORITY", "", option(socket.SOL_SOCKET, socket.SO_PRIORITY, 6))
    trial("IP_TOS", "a flow's priority class", option(socket.IPPROTO_IP, socket.IP_TOS, 0xE0))


def _lateness() -> str:
    """How late sleeps of a packet's length at 50 Mbit/s end."""
    late_us = []
    for _ in range(200):
        due_ns = time.monotonic_ns() + 250_000
        time.sleep(250e-6)
        late_us.append((time.monotonic_ns() - due_ns) / 1e3)
    late_us.sort()
    return f"{late_us[100]:.0f} us late in the median, {late_us[180]:.0f} one time in ten"


def _run_delay() -> str:
    delay = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return f"{delay} ns so far"


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_examine_here()))
