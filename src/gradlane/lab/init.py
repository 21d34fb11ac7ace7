"""`python -m gradlane.lab.init JOB_FD [COMMAND...]`: the processes that hold a lab. Only `launcher`
starts it.

    launcher                 any process; waits for the keeper
      `- keeper              makes the user, PID, mount and network namespaces; waits for init
           `- init           PID 1 of the new PID namespace: builds the network, starts and watches
           the ranks
                |- rank 0
                |- rank 1 ...
                |- servers, other traffic
                `- processes that change rates and sample links

Keeper and init each die with their parent (PR_SET_PDEATHSIG). When init dies, the kernel kills
every process of its PID namespace. Network namespaces and their links end with their last process.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from gradlane.errors import InputError, LabError
from gradlane.lab import awake, kernel, ranks
from gradlane.lab.links import changes, gauges, wires
from gradlane.lab.links.relay import relay
from gradlane.lab.messages import Job, Report, RunOutcome
from gradlane.lab.processes import processes
from gradlane.lab.spec import LabSpec
from gradlane.units import format_ns, format_rate


def main() -> None:
    started = time.monotonic()
    with open(int(sys.argv[1]), "rb") as stream:
        job = msgspec.json.decode(stream.read(), type=Job)
    command = sys.argv[2:]
    # Ctrl-C reaches every process of the terminal's job. It ends the ranks, and the launcher closes
    # the lifeline. Keeper and init start with SIGINT ignored and stay until the ranks have ended.
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
        _send(job, _hold(job, command, started))
        os._exit(0)
    os.waitpid(pid, 0)


def _send(job: Job, report: Report) -> None:
    with open(job.report_fd, "wb") as stream:
        stream.write(msgspec.json.encode(report))


def _hold(job: Job, command: list[str], started: float) -> Report:
    try:
        _furnish(job.spec)
        network = wires.string_up(job.spec)
        setup_seconds = time.monotonic() - started
        if job.announce:
            print(_announcement(job.spec, network.congestion_control, setup_seconds), file=sys.stderr, flush=True)
        exits = ranks.Exits((), 0, None)
        if command or job.spec.jobs:
            with suppress(OSError):
                awake.stay()
            everything = processes(job.spec, command, network.congestion_control)
            exits = ranks.run(job, everything, _helpers(job, network), network)
    except LabError as error:
        return Report(refused=str(error))
    except InputError as error:
        return Report(unusable=str(error))
    outcome = RunOutcome(
        exit_code=exits.exit_code,
        exit_codes=exits.exit_codes,
        first_failed_rank=exits.first_failed_rank,
        congestion_control=network.congestion_control,
        setup_seconds=setup_seconds,
        seconds=time.monotonic() - started,
    )
    return Report(outcome=outcome)


def _helpers(job: Job, network: wires.Wires) -> dict[int, str]:
    """Start the lab's own processes; returns by process id what each is for."""
    began_ns = time.monotonic_ns()
    helpers = {}
    if any(link is not None and link.steps for host in range(job.spec.hosts) for link in job.spec.links(host)):
        helpers[_fork(lambda: changes.follow(job.spec, network, began_ns))] = "the process that changes rates"
    if network.relayed:
        helpers[_fork(lambda: relay(network.relayed))] = "the process that delays and loses packets"
    if job.samples is not None:
        path = job.samples
        helpers[_fork(lambda: gauges.record(job.spec, network, path))] = "the process that samples links"
    return helpers


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _announcement(spec: LabSpec, congestion_control: str, setup_seconds: float) -> str:
    rate = spec.link_bits_per_second
    links = "unshaped links" if rate is None else f"links of {format_rate(round(rate * spec.scale) // 8)} each way"
    servers = sum(len(job.servers) for job in spec.jobs)
    parts = [_count(spec.hosts, "host") + (f" with {spec.ranks_per_host} ranks each" if spec.ranks_per_host > 1 else "")]
    parts += [_count(servers, "server")] if servers else []
    parts += [_count(len(spec.jobs), "job")] if len(spec.jobs) > 1 else []
    parts += [links + (f" but for {_count(len(spec.unlike), 'host')}" if spec.unlike else "")]
    parts += [f"rates and sizes x {spec.scale:g}"] if spec.scale != 1 else []
    parts += [f"{spec.network_classes} priority classes"] if spec.network_classes > 1 else []
    if spec.delay_ns:
        parts += [f"packets delayed by {format_ns(2 * spec.delay_ns)} from host to host"]
    if spec.loss_ppm:
        parts += [f"{spec.loss_ppm / 10_000:g} % of packets lost on each link"]
    parts += [f"other traffic in {_count(len(spec.traffic), 'flow')}"] if spec.traffic else []
    return f"gradlane lab: {', '.join(parts)}, {congestion_control}, ready in {setup_seconds:.2f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _furnish(spec: LabSpec) -> None:
    """Mount the PID namespace's /proc in the new mount namespace, and give the hosts names.

    `ps` and look-ups of the own host name need them. In a container that masks parts of its /proc,
    the kernel refuses a new one; then the old one stays, in which /proc/self is still right.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    with suppress(LabError):
        # /proc surely exists: mount a tmpfs there for a moment, for the file that is then bound to
        # /etc/hosts
        kernel.mount("tmpfs", "/proc", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64k")
        try:
            # the second line of each host: a socket for IPv4 and IPv6 looks up the IPv4-mapped
            # address
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
