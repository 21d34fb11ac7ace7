"""LaunchOptions: what a launcher's command line says, on its way to the ranks in one environment variable."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gradlane.core.backends import Algorithm, BackendName, SummationOrder
from gradlane.core.fields import need
from gradlane.errors import InputError

LAUNCH_VARIABLE = "GRADLANE_OPTIONS"
"""The environment variable in which a launcher hands `LaunchOptions` to the ranks."""
STALL_TIMEOUT_S = 2.5
"""Seconds after which a rank that says nothing is an error, where no option says otherwise: five beats."""


def need_stall_timeout(name: str, seconds: float) -> None:
    """Raise `InputError` unless a rank may be silent for `seconds`.

    Ranks speak every 0.5 s, and one beat may be late.
    """
    need(1 <= seconds <= 86_400, name, seconds, "seconds, from 1 to 86400")


class LaunchOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a launcher's command line says; fields that are None were not given. Paths are absolute.

    policy_knobs: of the policy that is named. knobs: a file of tuned ones. plan, network: files. wire_dtype: a name, see
    `gradlane.core.wire_dtype`. ddp: gradlane's DistributedDataParallel is put in the place of torch's.
    progress: seconds between two lines on what steps take.
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
