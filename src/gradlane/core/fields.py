"""How constructors of the data types refuse bad values.

The limits are generous for any real job, and small enough that no file can make a reader allocate
or compute without bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from gradlane.errors import InputError
from gradlane.units import MAX_BYTES as MAX_BYTES
from gradlane.units import MAX_NS as MAX_NS
from gradlane.units import MAX_RATE as MAX_RATE

MAX_TENSORS = 100_000
MAX_MESSAGES = 100_000  # seconds to plan and to simulate; one for each tensor at least
MAX_NAME = 1_000


def did_you_mean(got: str, names: Iterable[str]) -> str:
    """The part of an error that suggests the one of `names` nearest to `got`; empty if none is near."""
    close = difflib.get_close_matches(got.lower(), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def need(condition: bool, field: str, got: object, expected: str) -> None:
    """Raise `InputError` unless `condition` holds."""
    if not condition:
        raise InputError(f"{field}: got {got!r:.80}, expected {expected}")


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float. A bool is an int to Python and a mistake to everybody else."""
    return isinstance(value, (int, float)) and type(value) is not bool


def need_int(field: str, value: int, low: int, high: int) -> None:
    """Raise `InputError` unless `value` is an integer in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"{field}: got {value!r:.80}, expected an integer from {low} to {high}")


def need_name(field: str, value: str) -> None:
    """Raise `InputError` unless `value` is a printable name of sane length."""
    if type(value) is not str or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise InputError(f"{field}: got {value!r:.80}, expected 1 to {MAX_NAME} printable characters")
