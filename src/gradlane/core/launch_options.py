"""LaunchOptions: what a launcher's command line says, on its way to the ranks in one environment variable."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gradlane.core.backends import Algorithm, BackendName, SummationOrder
from gradlane.core.fields import is_number, need
from gradlane.errors import InputError

LAUNCH_VARIABLE = "GRADLANE_OPTIONS"
"""The environment variable in which a launcher hands `LaunchOptions` to the ranks."""
_OF_SESSIONS = {
    "policy": "--policy", "policy_knobs": "--knob", "plan": "--plan", "backend": "--backend", "algorithm": "--algorithm",
    "packet_bytes": "--packet-bytes", "summation_order": "--summation-order", "servers": "--servers", "weight": "--weight",
    "wire_dtype": "--wire-dtype", "network": "--network", "tune": "--tune", "knobs": "--knobs", "timeout": "--timeout",
    "stall_timeout": "--stall-timeout", "verify": "--verify", "check_finite": "--check-finite", "timeline": "--timeline",
    "progress": "--progress",
}  # fmt: skip
STALL_TIMEOUT_S = 60.0
"""Seconds after which a rank that says nothing is an error, where no option says otherwise.

A process that ends is noticed by its connection. A silent one most often comes back: its virtual machine migrates, its
container is paused, its host swaps, and under torch.distributed the job goes on. Clouds announce pauses of up to 30 s for
the maintenance of a host, so this is twice that.
"""


def need_stall_timeout(name: str, seconds: float) -> None:
    """Raise `InputError` unless a rank may be silent for `seconds`.

    Ranks speak every 0.5 s, and one beat may be late.
    """
    need(is_number(seconds) and 1 <= seconds <= 86_400, name, seconds, "seconds, from 1 to 86400")


class LaunchOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a launcher's command line says; fields that are None were not given. Paths are absolute.

    policy_knobs: of the policy that is named. knobs: a file of tuned ones. plan, network: files. wire_dtype: a name, see
    `gradlane.core.wire_dtype`. ddp: gradlane's DistributedDataParallel is put in the place of torch's.
    progress: seconds between two lines on what steps take. attached: a folder, in which a rank that attaches leaves a file.
    """

    policy: str | None = None
    policy_knobs: dict[str, int | float | str] = {}
    plan: str | None = None
    backend: BackendName | None = None
    algorithm: Algorithm | None = None
    packet_bytes: int | None = None
    summation_order: SummationOrder | None = None
    servers: int | None = None
    servers_store: str | None = None
    weight: int | None = None
    wire_dtype: str | None = None
    network: str | None = None
    tune: bool = False
    knobs: str | None = None
    timeout: float | None = None
    stall_timeout: float | None = None
    verify: bool = False
    check_finite: bool = False
    timeline: str | None = None
    profile: str | None = None
    ddp: bool = False
    progress: float | None = None
    attached: str | None = None

    def of_sessions(self) -> list[str]:
        """The options that were given and matter to a session only, as on the command line."""
        return [option for name, option in _OF_SESSIONS.items() if getattr(self, name) not in (None, False, {})]

    def without_effect(self) -> str:
        """What to say where no rank has attached: which options had no effect, and what to add."""
        *others, last = self.of_sessions()
        options = f"{', '.join(others)} and {last}" if others else last
        if self.ddp:
            return (
                f"{options} had no effect: gradlane took over no model; with --ddp it takes over what the script wraps in "
                "torch's DistributedDataParallel, after the first step of an optimizer of torch.optim, or says why not"
            )
        return (
            f"{options} had no effect: the script attached nothing; add --ddp if it wraps its model in torch's "
            "DistributedDataParallel, or two lines to the script: import gradlane, and gradlane.attach(model, optimizer) "
            "after both are made"
        )

    def to_text(self) -> str:
        """For the environment variable `LAUNCH_VARIABLE`."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> LaunchOptions:
        """What `to_text` gave; without the variable, nothing was said. Raises `InputError` for any other text."""
        text = environment.get(LAUNCH_VARIABLE) or "{}"
        try:
            return msgspec.json.decode(text, type=LaunchOptions)
        except msgspec.DecodeError as error:
            raise InputError(
                f'{LAUNCH_VARIABLE}: got {text!r:.200}, expected JSON as in {{"policy": "bytescheduler", "timeout": 120}} '
                f"({error}); `gradlane launch` sets it"
            ) from None
