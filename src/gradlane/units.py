"""Sizes, rates and times: parsed from what people write, printed for people to read.

Inside gradlane every quantity is an integer whose name ends in its unit (`size_bytes`,
`startup_ns`, `bytes_per_second`). Only this module converts to and from text.
"""

from __future__ import annotations

import difflib
import re

from gradlane.errors import InputError

NS_PER_SECOND = 1_000_000_000
MAX_BYTES = 2**50
MAX_NS = 10**18  # thirty years
MAX_RATE = 10**13  # bytes per second

_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9,
    "k": 2**10, "m": 2**20, "g": 2**30,
    "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip
_BITS_PER_SECOND = {
    "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12,
    "bps": 1, "kbps": 10**3, "mbps": 10**6, "gbps": 10**9, "tbps": 10**12,
}  # fmt: skip
_BYTES_PER_SECOND = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)B(?:ps|/s)?\s*")
_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)(?:/s)?\s*")


def _split(text: str, what: str, units: dict[str, int], example: str, shown: tuple[str, ...], most: int, most_text: str) -> int:
    """The value in the smallest unit. shown: the units that an error may suggest. most: its limit, and that for people."""
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match.group(2).lower() not in units:
        close = match and difflib.get_close_matches(match.group(2).lower(), [unit.lower() for unit in shown], n=1)
        unit = next((unit for unit in shown if close and unit.lower() == close[0]), None)
        meant = f" (did you mean {match[1]}{unit}?)" if match and unit else ""
        raise InputError(f"{what}: got {text!r:.80}{meant}, expected a number and a unit such as {example}")
    value = float(match.group(1)) * units[match.group(2).lower()]
    if value > most:
        raise InputError(f"{what}: got {text!r:.80}, expected at most {most_text}")
    return round(value)


def parse_bytes(text: str) -> int:
    """Parse ``"4MiB"`` or ``"512k"`` (binary units) or ``"4MB"`` (decimal) into bytes, `MAX_BYTES` at most.

    Raises:
        InputError: `text` is not a number and a unit of size, or more than that.
    """
    shown = ("kB", "MB", "GB", "KiB", "MiB", "GiB")
    return _split(text, "size", _BYTES, "4MiB, 512k or 25MB", shown, MAX_BYTES, format_bytes(MAX_BYTES))


def parse_rate(text: str) -> int:
    """Parse ``"500mbit"`` or ``"10gbit"`` into bits per second, as `tc` and switch vendors count; 8 * `MAX_RATE` at most.

    Raises:
        InputError: `text` is not a number and a unit of rate, or the rate is 0 or more than that. A rate in bytes, as in
            10GB/s, is none; the message has it in bits.
    """
    example = "500mbit or 10gbit"
    in_bytes = _BYTES_PER_SECOND.fullmatch(text)
    if in_bytes is not None:
        meant = f"{8 * float(in_bytes[1]):g}{in_bytes[2].lower()}bit"
        raise InputError(f"rate: got {text!r:.80} (did you mean {meant}?), expected a number and a unit such as {example}")
    shown = ("kbit", "mbit", "gbit")
    rate = _split(text, "rate", _BITS_PER_SECOND, example, shown, 8 * MAX_RATE, format_rate(MAX_RATE))
    if rate <= 0:
        raise InputError(f"rate: got {text!r}, expected more than zero")
    return rate


def parse_ns(text: str, most_ns: int = MAX_NS) -> int:
    """Parse ``"50us"``, ``"1.5ms"`` or ``"2s"`` into nanoseconds, `most_ns` at most.

    Raises:
        InputError: `text` is not a number and a unit of time, or more than that.
    """
    return _split(text, "time", _NS, "50us, 1.5ms or 2s", ("ns", "us", "ms", "s"), most_ns, format_ns(most_ns))


def counted(count: int, things: str) -> str:
    """How many things there are, for people: ``"3 tensors"``, ``"1 tensor"``.

    Args:
        count: how many.
        things: their name, in the plural by s.
    """
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


def format_bytes(size_bytes: int) -> str:
    """A size for people: ``"3.5 MiB"``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        text = f"{size:.0f}" if unit == "B" else f"{size:.1f}"
        if abs(float(text)) < 1024 or unit == "GiB":  # as it is printed: no 1024.0 KiB
            return f"{text} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_ns(time_ns: int) -> str:
    """A duration for people: ``"3.50 ms"``."""
    for unit, scale in (("s", 10**9), ("ms", 10**6)):
        if abs(time_ns) >= 0.999995 * scale:  # less would be 1000.00 of the smaller unit
            return f"{time_ns / scale:.2f} {unit}"
    return f"{time_ns / 1000:.2f} us" if abs(time_ns) >= 1000 else f"{time_ns} ns"


def format_rate(bytes_per_second: int) -> str:
    """A rate for people, in bits as networks are sold: ``"500 Mbit/s"``."""
    bits = bytes_per_second * 8
    for unit, scale in (("Tbit/s", 10**12), ("Gbit/s", 10**9), ("Mbit/s", 10**6), ("kbit/s", 10**3)):
        if bits >= 0.9995 * scale:  # less would be 1e+03 of the smaller unit
            return f"{bits / scale:.3g} {unit}"
    return f"{bits} bit/s"


def format_share(share: float) -> str:
    """A share as percent, with all of its digits: "99.99%"."""
    return f"{round(100 * share, 9):.12g}%"
