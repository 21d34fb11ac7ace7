"""`python -m gradlane.lab.init JOB [COMMAND...]`: the processes that hold a lab. Started by `launcher` only.

    launcher                 any process; waits for the keeper
      `- keeper              makes the user, PID, mount and network namespaces; waits for init
           `- init           PID 1 of the new PID namespace: builds the network, starts and watches the ranks
                |- rank 0
                `- rank 1 ...

Each of keeper and init dies with its parent (PR_SET_PDEATHSIG), and with init the kernel kills all that is in its PID
namespace, whoever its parent has become. Network namespaces and the links in them go with the last process inside.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from gradlane.errors import InputError, LabError
from gradlane.lab import kernel, ranks, wires
from gradlane.lab.spec import Job, LabSpec, Outcome, Report
from gradlane.units import format_rate


def main() -> None:
    started = time.monotonic()
    job = msgspec.json.decode(sys.argv[1], type=Job)
    command = sys.argv[2:]
    # Ctrl-C reaches every process of the terminal's job: ranks end by it, the launcher cuts the lifeline by it,
    # and these two stay to watch the ranks end
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        kernel.become_root_of_new_user_namespace(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
        # after the new user namespace, since gaining capabilities clears it
        kernel.die_with_parent()
    except LabError as error:
        _send(job, Report(refused=str(error)))
        return
    if os.getppid() != job.launcher_pid:
        return
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()
        _send(job, _hold(job, command, started, interrupt is signal.SIG_IGN))
        os._exit(0)
    os.waitpid(pid, 0)


def _send(job: Job, report: Report) -> None:
    with open(job.report_fd, "wb") as stream:
        stream.write(msgspec.json.encode(report))


def _hold(job: Job, command: list[str], started: float, ignores_interrupt: bool) -> Report:
    try:
        _furnish(job.spec)
        network = wires.string_up(job.spec)
        setup_seconds = time.monotonic() - started
        if job.announce:
            print(_announcement(job.spec, network.congestion_control, setup_seconds), file=sys.stderr, flush=True)
        exits = ranks.run(job, command, network, ignores_interrupt) if command else ranks.Exits((), 0, None)
    except LabError as error:
        return Report(refused=str(error))
    except InputError as error:
        return Report(unusable=str(error))
    outcome = Outcome(
        exit_code=exits.exit_code,
        exit_codes=exits.exit_codes,
        first_failed_rank=exits.first_failed_rank,
        congestion_control=network.congestion_control,
        setup_seconds=setup_seconds,
        seconds=time.monotonic() - started,
    )
    return Report(outcome=outcome)


def _announcement(spec: LabSpec, congestion_control: str, setup_seconds: float) -> str:
    rate = spec.link_bits_per_second
    links = "unshaped links" if rate is None else f"links of {format_rate(rate // 8)} each way"
    hosts = "1 host" if spec.hosts == 1 else f"{spec.hosts} hosts"
    return f"gradlane lab: {hosts}, {links}, {congestion_control}, ready in {setup_seconds:.2f} s"


def _furnish(spec: LabSpec) -> None:
    """Give the new mount namespace a /proc of the new PID namespace, and names for the hosts.

    Both are for comfort: `ps` and a lookup of the own host name. A container that masks parts of its /proc makes the
    kernel refuse a fresh one, and then the old one stays, in which /proc/self is still right.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    with suppress(LabError):
        # /proc is a directory that surely exists: for a moment it carries the file that /etc/hosts will show
        kernel.mount("tmpfs", "/proc", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64k")
        try:
            # the second line of each: a socket that speaks both IPv4 and IPv6 asks for the name of the mapped address
            names = "".join(
                f"{address} host{host}\n::ffff:{address} host{host}.lab\n" for host, address in enumerate(spec.addresses)
            )
            Path("/proc/hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
            kernel.mount("/proc/hosts", "/etc/hosts", "", kernel.MS_BIND)
        finally:
            kernel.unmount("/proc")
    with suppress(LabError):
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


if __name__ == "__main__":
    main()
