"""The processes of a lab: ranks and servers of every job, and traffic, with host and environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from gradlane.lab.spec import Flow, JobSpec, LabSpec, type_of_service

INTERFACE = "eth0"
"""The name of a host's only interface, inside the host."""
MASTER_PORT = 29500
TRAFFIC_PORT = 29900


class Process(NamedTuple):
    """One process of a lab.

    Attributes:
        title: its name, for people.
        host, command, environment: what runs where.
        rank: its number among the ranks of all jobs; None for other processes. The lab ends when
            all ranks have.
        prefix: printed before each of its lines; None: it writes to the launcher's streams
            directly.
    """

    title: str
    host: int
    command: tuple[str, ...]
    environment: dict[str, str]
    rank: int | None
    prefix: str | None


def processes(spec: LabSpec, command: Sequence[str], congestion_control: str) -> list[Process]:
    """All processes of `spec`, in the order in which they start."""
    everything: list[Process] = []
    before = 0
    for number, job in enumerate(spec.all_jobs):
        everything += _ranks(spec, job, number, tuple(command), congestion_control, before)
        everything += _servers(spec, job, number, congestion_control)
        before += len(job.workers)
    for number, flow in enumerate(spec.traffic):
        everything += _traffic(spec, flow, number)
    return everything


def _ranks(
    spec: LabSpec, job: JobSpec, number: int, command: tuple[str, ...], congestion_control: str, before: int
) -> list[Process]:
    hosts = list(dict.fromkeys(job.workers))
    alone = len(spec.all_jobs) == 1
    shown = job.name or str(number)
    ranks = []
    for rank, host in enumerate(job.workers):
        environment = {
            **_common(spec, job, number, host, congestion_control),
            "RANK": str(rank),
            "LOCAL_RANK": str(job.workers[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(job.workers.count(host)),
            "GROUP_RANK": str(hosts.index(host)),
            "GROUP_WORLD_SIZE": str(len(hosts)),
            "GRADLANE_LAB_ROLE": "worker",
        }
        title = f"rank {rank} (host{host})" if alone else f"rank {rank} of job {shown} (host{host})"
        prefix = None if before + rank == 0 else f"[{rank}] " if alone else f"[{shown}.{rank}] "
        ranks.append(Process(title, host, job.command or command, environment, before + rank, prefix))
    return ranks


def _servers(spec: LabSpec, job: JobSpec, number: int, congestion_control: str) -> list[Process]:
    alone = len(spec.all_jobs) == 1
    shown = job.name or str(number)
    servers = []
    for index, host in enumerate(job.servers):
        environment = _common(spec, job, number, host, congestion_control)
        environment |= {"GRADLANE_LAB_ROLE": "server", "GRADLANE_LAB_SERVER": str(index)}
        meets = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        command = job.server_command or (sys.executable, "-m", "gradlane", "server", "--quiet", meets)
        title = f"server {index} (host{host})" if alone else f"server {index} of job {shown} (host{host})"
        prefix = f"[server {index}] " if alone else f"[{shown}.server {index}] "
        servers.append(Process(title, host, command, environment, None, prefix))
    return servers


def _common(spec: LabSpec, job: JobSpec, number: int, host: int, congestion_control: str) -> dict[str, str]:
    """The variables that torchrun would set, and the lab's own."""
    rate = spec.link_bits_per_second
    return {
        "WORLD_SIZE": str(len(job.workers)),
        "MASTER_ADDR": spec.addresses[job.workers[0]],
        "MASTER_PORT": str(MASTER_PORT + number),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "GRADLANE_LAB": "1",
        "GRADLANE_LAB_LINK": "" if rate is None else str(round(rate * spec.scale)),
        "GRADLANE_LAB_CONGESTION_CONTROL": congestion_control,
        "GRADLANE_LAB_SCALE": f"{spec.scale:g}",
        "GRADLANE_LAB_COMPUTE_PERCENT": str(spec.compute_percent(host)),
        "GRADLANE_LAB_SERVERS": str(len(job.servers)),
        "GRADLANE_LAB_ADDRESS": spec.addresses[host],
        **job.environment,
    }


def _traffic(spec: LabSpec, flow: Flow, number: int) -> list[Process]:
    """Both ends of a flow, the listening one first."""
    module = (sys.executable, "-m", "gradlane.lab.traffic")
    port = str(TRAFFIC_PORT + number)
    rate = "0" if flow.bytes_per_second is None else str(max(round(flow.bytes_per_second * spec.scale), 1))
    tos = type_of_service(spec.network_classes - 1 if flow.network_class is None else flow.network_class)
    times = (str(flow.start_ns), "-1" if flow.end_ns is None else str(flow.end_ns))
    receive = (*module, "receive", spec.addresses[flow.target], port)
    send = (*module, "send", spec.addresses[flow.target], port, rate, str(tos), *times)
    title, prefix = f"traffic {number}", f"[traffic {number}] "
    return [
        Process(f"{title} (to host{flow.target})", flow.target, receive, {}, None, prefix),
        Process(f"{title} (from host{flow.source})", flow.source, send, {}, None, prefix),
    ]
