"""Read and write the data types as JSON.

A file is one object: {"format": "gradlane.profile", "version": 1, "body": {...}}. The reader
refuses unknown fields, wrong types, NaN, numbers out of range and files above 64 MiB, and names the
place in the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.dispatch_log import Log
from gradlane.core.records.search_log import SearchLog
from gradlane.core.records.tuned import Tuned
from gradlane.core.timeline import Timeline
from gradlane.errors import FormatError

VERSION = 1
MAX_FILE_BYTES = 64 * 2**20

Noun = TypeVar("Noun", Profile, Network, Cluster, Plan, Timeline, Tuned, Log, SearchLog)
Part = TypeVar("Part")


class _Head(msgspec.Struct):
    format: str
    version: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    body: msgspec.Raw


def dumps(noun: Profile | Network | Cluster | Plan | Timeline | Tuned | Log | SearchLog) -> bytes:
    """Encode `noun` as JSON bytes; `loads` gives back an equal value."""
    name = f"gradlane.{type(noun).__name__.lower()}"
    return msgspec.json.encode(_File(name, VERSION, msgspec.Raw(msgspec.json.encode(noun))))


def loads(data: bytes, kind: type[Noun]) -> Noun:
    """Decode a value from JSON bytes.

    Args:
        data: the bytes of a file, at most 64 MiB.
        kind: the type to expect.

    Raises:
        FormatError: with the place of the first fault.
    """
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(f"got {len(data)} bytes, expected at most {MAX_FILE_BYTES}")
    expected = f"gradlane.{kind.__name__.lower()}"
    head = _decode(data, _Head, "$", expected)
    if head.format != expected:
        raise FormatError(f"got a {head.format!r:.80}, expected a {expected!r}", "$.format")
    if head.version != VERSION:
        raise FormatError(f"got version {head.version}, expected {VERSION}; this gradlane reads no other", "$.version")
    body = _decode(data, _File, "$", expected).body
    return _decode(body, kind, "$.body", expected)


def _decode(data: bytes | msgspec.Raw, kind: type[Part], root: str, expected: str) -> Part:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        # msgspec ends its message with " - at `$.place`"
        match = re.fullmatch(r"(.*?)(?: - at `(.*)`)?", str(error), re.DOTALL)
        assert match is not None
        raise FormatError(match.group(1), (match.group(2) or "$").replace("$", root, 1)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a {expected} file: {error}", root) from None


def write(path: str | Path, noun: Profile | Network | Cluster | Plan | Timeline | Tuned | Log | SearchLog) -> None:
    """Write `noun` to a file. The file is renamed into place, so that no reader sees a part of it."""
    target = Path(path)
    scratch = target.with_name(target.name + ".part")
    scratch.write_bytes(dumps(noun))
    scratch.replace(target)


def read(path: str | Path, kind: type[Noun]) -> Noun:
    """Read a value of type `kind` from a file.

    Raises:
        FormatError: as `loads`, and with the file's name.
        OSError: the file cannot be opened.
    """
    with Path(path).open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        return loads(data, kind)
    except FormatError as error:
        raise error.of_file(path) from None
