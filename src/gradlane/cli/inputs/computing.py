"""What computes, on the command line: a profile by file or by zoo name, and how fast its device is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from gradlane import zoo
from gradlane.cli.inputs import completion
from gradlane.cli.inputs.faults import naming, one_of
from gradlane.cli.inputs.types import COUNT, PART, Choice, parse_time
from gradlane.core import files
from gradlane.core.fields import MAX_NAME
from gradlane.core.profile import Profile
from gradlane.core.wire_dtype import WIRE_DTYPES
from gradlane.errors import InputError
from gradlane.planning.questions.memory import Replica
from gradlane.units import NS_PER_SECOND, format_ns

PROFILE_HELP = "PROFILE is a file or a name of `gradlane zoo`."
_WINOGRAD = 4  # of a convolution's products F(4x4, 3x3) carries out one in so many (Lavin and Gray, 2016)
MOST_STEP_NS = 10**6 * NS_PER_SECOND
COMPUTE_DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Computing:
    """The options that say what computes: `computing_options`.

    Attributes:
        device, batch, compute_dtype, mfu: as `zoo.profile` takes them, compute_dtype by a key of `COMPUTE_DTYPES`; None
            for the default.
        wire_dtype: a key of `WIRE_DTYPES`, as which float32 gradients travel; None for float32.
        step_ns: the time of a step without communication; None: as the profile says.
        jitter: standard deviation of a device's step, as a part of it.
        clips: the order of the norm to which gradients are clipped in each step; None: they are not.
    """

    device: str | None = None
    batch: int | None = None
    wire_dtype: str | None = None
    compute_dtype: str | None = None
    mfu: float | None = None
    step_ns: int | None = None
    jitter: float = 0.0
    clips: float | None = None

    @staticmethod
    def take(options: dict[str, Any]) -> Computing:
        """Take the values of `computing_options` out of a command's keywords.

        Raises:
            InputError: options do not go together.
        """
        step_time = options.pop("step_time")
        found = Computing(
            **{name: options.pop(name) for name in ("device", "batch", "wire_dtype", "compute_dtype", "mfu")},
            step_ns=None if step_time is None else parse_time("--step-time", step_time, MOST_STEP_NS),
            jitter=options.pop("jitter") or 0.0,
            clips=2.0 if options.pop("clips") else None,
        )
        if found.step_ns is not None and found.mfu is not None:
            raise InputError("--mfu: got it with --step-time, expected one or the other")
        if found.step_ns == 0:
            raise InputError(f"--step-time: got {step_time!r}, expected more than zero")
        return found

    def read(self, text: str, argument: str = "PROFILE") -> Profile:
        """Read a profile's file, or take a profile from the zoo.

        Args:
            text: path of the file, or a name of the zoo.
            argument: where `text` was given, for errors.

        Raises:
            InputError: `text` is neither, or what only names of the zoo have is given with a file.
        """
        profile = self._computed(text, argument)
        if self.step_ns is not None:
            if not profile.compute_ns:
                raise InputError(f"--step-time: got it with {text}, whose steps take no time; expected a profile with times")
            self._need_possible_step(text, self.step_ns)
            source = f"a step of {format_ns(self.step_ns)} as stated; {profile.source}"[:MAX_NAME]
            profile = msgspec.structs.replace(profile.lasting(self.step_ns), source=source)
        return profile.with_wire_dtype(None if self.wire_dtype is None else WIRE_DTYPES[self.wire_dtype])

    def replica(self, text: str) -> Replica | None:
        """The memory of a replica of what `read` reads; None where its device is none of the zoo's."""
        if not Path(text).is_file():
            device, batch, dtype = self._of_zoo(text)
            activations = zoo.activation_bytes(text, batch, dtype)
            spec = zoo.DEVICES[device]
            return Replica.of(self._computed(text), spec.title, spec.memory_bytes, activations, batch)
        profile = self._computed(text)
        found = zoo.DEVICES.get(profile.device)
        return None if found is None else Replica.of(profile, found.title, found.memory_bytes)

    def utilization(self, text: str, profile: Profile) -> str | None:
        """For people: the part of the device's peak at which a model of the zoo computes; None for a file."""
        if Path(text).is_file():
            return None
        device, batch, dtype = self._of_zoo(text)
        peak = zoo.DEVICES[device].peak(dtype)
        part = zoo.training_operations(text, batch) / (profile.compute_ns / 1e9) / peak
        counted = " as counted; Winograd's algorithm carries out fewer" if part > 1 and self.step_ns is None else ""
        return f"{part:.0%} of {peak / 1e12:g} {zoo.PRODUCTS[dtype]} TFLOP/s{counted}"

    def of_zoo(self, argument: str, name: str) -> Profile:
        """A profile of the zoo.

        Args:
            argument: where the name was given, for errors.
            name: of the network.

        Raises:
            InputError: there is no such network or device, or the device has no products of the dtype.
        """
        if self.device is not None and self.device not in zoo.devices():
            raise InputError(f"--device: got {one_of(self.device, zoo.devices())}")
        with naming(argument):
            zoo.describe(name)
        device, batch, dtype = self._of_zoo(name)
        spec = zoo.DEVICES[device]
        if dtype not in spec.operations_per_second:
            known = ", ".join(key for key, each in COMPUTE_DTYPES.items() if each in spec.operations_per_second)
            raise InputError(
                f"--compute-dtype: got {self.compute_dtype!r}, expected one that {spec.title} has products of: {known}"
            )
        with naming("--mfu"):
            return zoo.profile(name, device=device, batch=batch, compute_dtype=dtype, mfu=self.mfu)

    def _need_possible_step(self, text: str, step_ns: int) -> None:
        """Refuse a --step-time that is too short for --device, or without it for every device of the zoo.

        A profile in a file does not say how many operations a step has. So its step may take any time.
        """
        if Path(text).is_file():
            return
        _, batch, _ = self._of_zoo(text)
        specs = list(zoo.DEVICES.values()) if self.device is None else [zoo.DEVICES[self.device]]
        most = _WINOGRAD * max(peak for spec in specs for peak in spec.operations_per_second.values())
        least_ns = math.ceil(zoo.training_operations(text, batch) / most * NS_PER_SECOND)
        if step_ns < least_ns:
            who = "device of the zoo" if self.device is None else specs[0].title
            raise InputError(
                f"--step-time: got {format_ns(step_ns)}, expected {format_ns(least_ns)} or more: no {who} computes {text} "
                f"at batch {batch} in less; give the time of a whole step, and the --batch that it is of"
            )

    def _computed(self, text: str, argument: str = "PROFILE") -> Profile:
        path = Path(text)
        if path.is_file():
            given = {"--device": self.device, "--batch": self.batch, "--compute-dtype": self.compute_dtype, "--mfu": self.mfu}
            options = [option for option, value in given.items() if value is not None]
            if options:
                got = "it" if len(options) == 1 else "them"
                raise InputError(f"{', '.join(options)}: got {got} with the file {text}, expected a name of the zoo")
            return files.read(path, Profile)
        if path.suffix == ".json" or "/" in text:
            raise InputError(
                f"{argument}: got {text!r}, which is not a file; expected the path of one, or a name of gradlane zoo"
            )
        return self.of_zoo(argument, text)

    def _of_zoo(self, name: str) -> tuple[str, int, str]:
        """Device, batch and compute dtype of a name of the zoo."""
        entry = zoo.describe(name)
        device = self.device or entry.device
        dtype = zoo.DEVICES[device].default_dtype if self.compute_dtype is None else COMPUTE_DTYPES[self.compute_dtype]
        return device, self.batch or entry.batch, dtype


def computing_options(command: Callable[..., Any], *, jitter: bool = True) -> Callable[..., Any]:
    """Add the options that say what computes; the command gives its keywords to `Computing.take`.

    Args:
        command: gets the options.
        jitter: False hides --jitter, which the command then refuses.
    """
    for option in (
        click.option(
            "--clips",
            is_flag=True,
            help="Gradients are clipped by their norm in each step: only plans of `owners` cross the barrier.",
        ),
        click.option(
            "--jitter",
            type=PART,
            metavar="PART",
            help="Standard deviation of a device's step, as in 5%; each step waits for the slowest device.  [default: none]",
            hidden=not jitter,
        ),
        click.option(
            "--step-time", metavar="TIME", help="Of a step without communication, as in 250ms: all of its parts in proportion."
        ),
        click.option(
            "--mfu", type=PART, metavar="PART", help="Part of the device's peak at which it computes, as in 0.4 or 40%."
        ),
        click.option(
            "--compute-dtype",
            type=Choice(list(COMPUTE_DTYPES)),
            help="Of products and activations, as under autocast, for a name of the zoo.  [default: the device's for float32]",
        ),
        click.option(
            "--wire-dtype", type=Choice(list(WIRE_DTYPES)), help="Float32 gradients travel as this, in half of the bytes."
        ),
        click.option("--batch", type=COUNT, help="Samples a worker and iteration, for a name of the zoo."),
        click.option(
            "--device",
            shell_complete=completion.devices,
            help="Device for a name of the zoo (gradlane zoo --devices lists them).",
        ),
    ):
        command = option(command)
    return command
