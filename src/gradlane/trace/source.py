"""Reading an untrusted file: bounded, decompressed while it is read, its numbers checked."""

from __future__ import annotations

import codecs
import gzip
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradlane.core.fields import MAX_NS, MAX_TENSORS
from gradlane.core.profile import TensorSpec
from gradlane.errors import FormatError

MAX_BYTES = 192 * 2**20  # a string of that length takes four times as much, where one of its characters is a rare one
MAX_PARTS = 1_200_000  # JSON objects, two for an event: two seconds, and up to 400 bytes for each
MAX_LINE = 10_000  # characters that a regular expression has to search
MAX_SHAPE = 10_000  # bytes of JSON that describe one gradient's shape


def load(path: str | Path) -> bytes:
    """The file's bytes, decompressed if gzip; at most `MAX_BYTES` of them."""
    with Path(path).open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            data = (gzip.GzipFile(fileobj=file) if is_gzip else file).read(MAX_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FormatError(f"{path}: damaged or cut short: {error}") from None
    if len(data) > MAX_BYTES:
        raise FormatError(f"{path}: more than {MAX_BYTES} bytes of text; record fewer steps")
    if not data.strip():
        raise FormatError(f"{path}: got an empty file, expected a trace")
    return data.removeprefix(codecs.BOM_UTF8)


def need_few_objects(data: bytes, name: str) -> None:
    """Refuse JSON of more than `MAX_PARTS` objects before any is made: a small compressed file can hold more than
    memory does.
    """
    if (objects := data.count(b"{")) > MAX_PARTS:
        raise FormatError(f"{name}: got {objects} JSON objects, expected at most {MAX_PARTS}; record fewer steps")


def lines(data: bytes) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file."""
    if data.count(b"\n") + data.count(b"\r") > 10 * MAX_TENSORS:  # before there is a string for each
        raise FormatError(f"more than {10 * MAX_TENSORS} lines")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"not a text file: {error}", f"byte {error.start}") from None
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if len(line) > MAX_LINE:
            raise FormatError(f"got {len(line)} characters, expected at most {MAX_LINE}", f"line {number}")
        yield number, line


def number_of(text: str, place: str, what: str, most: float) -> float:
    """A number from 0 to `most`; `FormatError` with the place otherwise."""
    try:
        value = float(text)
    except ValueError:
        raise FormatError(f"{what}: got {text!r:.40}, expected a number", place) from None
    if not (math.isfinite(value) and 0 <= value <= most):
        raise FormatError(f"{what}: got {text:.40}, expected 0 to {most:g}", place)
    return value


def time_ns(text: str, unit_ns: float, place: str, what: str) -> int:
    return round(number_of(text, place, what, MAX_NS / unit_ns) * unit_ns)


def named(name: str, sizes: Sequence[tuple[int, str] | None], tensors: Sequence[TensorSpec] | None) -> list[TensorSpec]:
    """Names for gradients.

    Args:
        name: the file's name, for errors.
        sizes: (size_bytes, dtype) of each gradient, or None if the trace does not tell.
        tensors: names and sizes, which must match; None: the gradients are numbered.
    """
    if tensors is None:
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise FormatError(
                f"{name}: gradients without shapes; profile with record_shapes=True, or give a profile of the same model "
                "(--names-from)"
            )
        return [TensorSpec(f"gradient{index}", size, dtype) for index, (size, dtype) in enumerate(known)]
    if len(tensors) != len(sizes):
        raise FormatError(f"{name}: the trace has {len(sizes)} gradients, the model given has {len(tensors)} tensors")
    for index, (size, spec) in enumerate(zip(sizes, tensors, strict=True)):
        if size is not None and size != (spec.size_bytes, spec.dtype):
            raise FormatError(
                f"{name}: gradient {index} has {size[0]} bytes of {size[1]}, {spec.name} of the model given has "
                f"{spec.size_bytes} of {spec.dtype}"
            )
    return list(tensors)


def increasing(times: Sequence[int]) -> list[int]:
    """The running maximum of `times`."""
    return list(itertools.accumulate(times, max))
