"""What a lab is made of, and the names and addresses in it. Data only; nothing is started here."""

from __future__ import annotations

import msgspec

from gradlane.errors import InputError

INTERFACE = "eth0"
"""The name of a host's only link, in that host."""
MASTER_PORT = 29500
MOST_HOSTS = 64
TIMED_OUT = 124  # as timeout(1) has it
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

_FASTEST_LINK = 100 * 10**9
_SLOWEST_LINK = 10**6


class LabSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hosts around one switch, all links alike.

    A link is shaped to `link_bits_per_second` in each direction by itself (Ethernet headers count, as on a real
    port), with a queue of `queue_ns` at that rate before it drops; None leaves links as fast as the processor.
    """

    hosts: int
    link_bits_per_second: int | None = None
    queue_ns: int = 5_000_000
    mtu_bytes: int = 1500

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise InputError(f"lab hosts: got {self.hosts}, expected 1 to {MOST_HOSTS}")
        rate = self.link_bits_per_second
        if rate is not None and not _SLOWEST_LINK <= rate <= _FASTEST_LINK:
            raise InputError(f"lab link: got {rate} bit/s, expected 1mbit to 100gbit, or none for an unshaped link")
        if not 100_000 <= self.queue_ns <= 1_000_000_000:
            raise InputError(f"lab queue: got {self.queue_ns} ns, expected 100 us to 1 s")
        if not 576 <= self.mtu_bytes <= 9000:
            raise InputError(f"lab MTU: got {self.mtu_bytes} bytes, expected 576 to 9000")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each host."""
        return tuple(f"10.77.0.{host + 1}" for host in range(self.hosts))


class Outcome(msgspec.Struct, frozen=True):
    """How a run in a lab ended.

    `exit_code` is that of the first rank that failed (128 + signal where a signal ended it), 124 when the time
    was up, 130 when the user interrupted, else 0. `exit_codes` are those of each rank, counted the same way.
    """

    exit_code: int = 0
    exit_codes: tuple[int, ...] = ()
    first_failed_rank: int | None = None
    congestion_control: str = ""
    setup_seconds: float = 0.0
    seconds: float = 0.0


class Job(msgspec.Struct, frozen=True):
    """What the launcher tells the lab's init, beside the command and the environment."""

    spec: LabSpec
    launcher_pid: int
    lifeline_fd: int
    report_fd: int
    grace_seconds: float
    timeout_seconds: float | None
    announce: bool


class Report(msgspec.Struct, frozen=True):
    """What the lab's init tells the launcher, once: how the run ended, or why there was none."""

    outcome: Outcome | None = None
    refused: str | None = None
    unusable: str | None = None


def rank_environment(spec: LabSpec, rank: int, congestion_control: str) -> dict[str, str]:
    """The variables that torchrun would set for one rank a host, and those that only a lab has."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(spec.hosts),
        "MASTER_ADDR": spec.addresses[0],
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "GRADLANE_LAB": "1",
        "GRADLANE_LAB_LINK": "" if spec.link_bits_per_second is None else str(spec.link_bits_per_second),
        "GRADLANE_LAB_CONGESTION_CONTROL": congestion_control,
    }
