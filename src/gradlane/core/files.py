"""Read and write the data types as JSON.

A file is one object: {"format": "gradlane.profile", "version": 1, "body": {...}}. The reader
refuses unknown fields, wrong types, NaN, numbers out of range and files above 64 MiB or a million
objects and lists, and names the place in the file. So no file takes more than some seconds.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from gradlane.core.checks import check_plan
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.dispatch_log import Log
from gradlane.core.records.search_log import SearchLog
from gradlane.core.records.tuned import Tuned
from gradlane.core.timeline import Timeline
from gradlane.errors import FormatError, OutputError, PlanError

_log = logging.getLogger("gradlane")

VERSION = 1
MOST_REASON = 500
"""Characters of what an error says is wrong with a file."""

MAX_FILE_BYTES = 64 * 2**20
MAX_PARTS = 1_000_000  # objects and lists of one file: each takes a microsecond and a hundred bytes or more

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
        FormatError: with the place of the first fault. A plan whose messages do not move each byte once has one, too.
    """
    expected = f"gradlane.{kind.__name__.lower()}"
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(f"got {len(data)} bytes, expected at most {MAX_FILE_BYTES}")
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        raise FormatError(f"got an empty file, expected a {expected!r} file")
    need_few_parts(data, MAX_PARTS)
    head = decode(data, _Head, "$", expected)
    if head.format != expected:
        raise FormatError(f"got a {head.format!r:.80}, expected a {expected!r}", "$.format")
    if head.version != VERSION:
        raise FormatError(f"got version {head.version}, expected {VERSION}; this gradlane reads no other", "$.version")
    noun = decode(decode(data, _File, "$", expected).body, kind, "$.body", expected)
    if isinstance(noun, Plan):
        try:
            check_plan(noun, noun.tensors)
        except PlanError as error:
            raise FormatError(str(error), "$.body") from None
    return noun


def read_where(path: str | Path) -> Network | Cluster:
    """Read a file of a network, or of a cluster.

    Raises:
        OSError, FormatError: as `read`.
    """
    try:
        return read(path, Network)
    except FormatError as error:
        if error.path == "$.format" and "'gradlane.cluster'" in error.reason:
            return read(path, Cluster)
        raise


def need_few_parts(data: bytes, most: int, advice: str = "") -> None:
    """Refuse JSON of more than `most` objects and lists, before anything is made of it.

    Args:
        data: the text. Brackets within strings count too.
        most: objects and lists together.
        advice: what to do, for the error.

    Raises:
        FormatError: there are more.
    """
    parts = data.count(b"{") + data.count(b"[")
    if parts > most:
        raise FormatError(f"got {parts} objects and lists, expected at most {most}{advice}")


def decode(data: bytes | msgspec.Raw, kind: type[Part], root: str, expected: str) -> Part:
    """Decode a part of a file.

    Args:
        data: JSON.
        kind: the type to expect.
        root: where in the file `data` stands, as in `$.body`.
        expected: the file's format, for errors.

    Raises:
        FormatError: with the place of the first fault.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        # msgspec ends its message with " - at `$.place`"
        match = re.fullmatch(r"(.*?)(?: - at `(.*)`)?", str(error), re.DOTALL)
        assert match is not None
        raise FormatError(reason_of(match.group(1)), (match.group(2) or "$").replace("$", root, 1)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"got no JSON ({error}), expected a {expected!r} file", root) from None


_FORMS = (
    (re.compile(r"Object missing required field `(.*)`"), r"got an object without {0!r}, expected one with it"),
    (re.compile(r"Object contains unknown field `(.*)`"), r"got the unknown field {0!r}, expected none"),
    (re.compile(r"Expected `(.*)`, got `(.*)`"), r"got a value of type {1}, expected {0}"),
    (re.compile(r"Invalid enum value (.*)"), r"got {0}, expected a value that gradlane knows there"),
    (re.compile(r"(?:Integer value|Number) out of range"), r"got a number of more than 64 bits, expected a smaller one"),
)


def reason_of(error: str) -> str:
    """What msgspec says is wrong with a value, in the form of gradlane's errors, and not too long: it quotes the file."""
    for form, text in _FORMS:
        if found := form.fullmatch(error):
            error = text.format(*found.groups())
            break
    return error if len(error) <= MOST_REASON else f"{error[: MOST_REASON // 2]} ... {error[-MOST_REASON // 2 :]}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `OutputError` with the file's name where writing to `path` fails meanwhile."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{path}: got an error while writing it ({reason}); make room, or give another file") from error


def write(path: str | Path, noun: Profile | Network | Cluster | Plan | Timeline | Tuned | Log | SearchLog) -> None:
    """Write `noun` to a file, as `write_bytes` does."""
    write_bytes(Path(path), dumps(noun))


def write_bytes(target: Path, data: bytes) -> None:
    """Write a file. It is renamed into place, so that no reader sees a part of it, and a full disk leaves none.

    A device or a pipe is written to instead.
    """
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    scratch = target.with_name(target.name + ".part")
    try:
        scratch.write_bytes(data)
        scratch.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def leave(path: str | Path, noun: Profile | Network | Cluster | Plan | Timeline | Tuned | Log) -> None:
    """Write `noun` to a file beside a job that trains, and make its folder. A full disk, or a folder
    that nobody may write to, costs one line of the log and not the job.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write(path, noun)
    except OSError as error:
        _log.warning("gradlane: %s was not written, and the job goes on: %s", path, error.strerror or error)


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
