"""Types of options that several commands have: numbers above zero, sizes, files and folders to write.

Whether a file or folder can be written is checked before the command does its work.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from gradlane.cli.inputs.faults import naming, one_of
from gradlane.errors import InputError
from gradlane.report.plots import PLOT_SUFFIXES, need_matplotlib
from gradlane.units import MAX_NS, parse_bytes, parse_ns, parse_rate

_MOST = 1_000_000


class Checked(click.ParamType):  # type: ignore[type-arg]  # older releases of click have no parameter here
    """A type of what a function makes of the text, or refuses with an `InputError`.

    Args:
        name: what --help shows where the option names nothing.
        parse: the function.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(str(value))
        except InputError as error:
            self.fail(str(error), param, ctx)


def whole_number(least: int = 1, most: int = _MOST) -> Checked:
    """The type of an integer from `least` to `most`."""

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
        if number is None or not least <= number <= most:
            raise InputError(f"got {text!r}, expected an integer from {least} to {most}")
        return number

    return Checked("integer", parse)


def positive(what: str, most: float = math.inf) -> Checked:
    """The type of a finite number above zero.

    Args:
        what: what it is a number of, for errors.
        most: its limit.
    """

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise InputError(f"got {text!r}, expected {what}, more than zero")
        if number > most:
            raise InputError(f"got {text!r}, expected {what}, at most {most}")
        return number

    return Checked("number", parse)


def number_of(text: str) -> float:
    """The number that a text is, as 0.4 for 40%; NaN if it is none."""
    number = text.removesuffix("%")
    try:
        return float(number) / (1 if number == text else 100)
    except ValueError:
        return math.nan


def _part(text: str) -> float:
    part = number_of(text)
    if not 0 < part <= 1:
        raise InputError(f"got {text!r}, expected a part, more than 0 and at most 1, as in 0.4 or 40%")
    return part


def _size(text: str) -> int:
    size_bytes = parse_bytes(text)
    if size_bytes < 1:
        raise InputError(f"got {text!r}, expected one byte or more")
    return size_bytes


class Choice(click.Choice):  # type: ignore[type-arg]  # older releases of click have no parameter here
    """One of some words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"got {one_of(str(value), map(str, self.choices))}", param, ctx)


class _Place(click.Path):
    """A file or a folder, as click checks it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(f"got '', expected the path of a {'folder' if self.dir_okay else 'file'}", param, ctx)
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            path, noun = Path(str(value)), "folder" if self.dir_okay else "file"
            if path.exists() and path.is_dir() == self.dir_okay:
                self.fail(f"got {str(value)!r}, expected another {noun}: {error.message}", param, ctx)
            which = "is a folder" if path.is_dir() else "is a file" if path.exists() else "does not exist"
            self.fail(f"got {str(value)!r}, which {which}, expected the path of a {noun}", param, ctx)


class _OutFile(_Place):
    """A file to write, in a folder that exists and can be written to."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        try:
            return writable(path)
        except InputError as error:
            self.fail(str(error), param, ctx)


class _PlotFile(_OutFile):
    """A file to draw into, of a kind that can be drawn."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(str(value)).suffix not in PLOT_SUFFIXES:
            self.fail(f"got {str(value)!r}, expected a name that ends in {', '.join(PLOT_SUFFIXES)}", param, ctx)
        need_matplotlib()
        return super().convert(value, param, ctx)


def writable(path: Path) -> Path:
    """`path`, a file to write. Raises `InputError` if it is a folder, or its folder is not there or takes no file."""
    if path.is_dir():
        raise InputError(f"got {str(path)!r}, which is a folder; expected the path of a file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"got {str(path)!r}, whose folder does not exist; make it, or give another")
    reason = _why_not_writable(folder)
    if reason is not None:
        raise InputError(f"got {str(path)!r}, in whose folder no file can be made ({reason}); give another")
    return path


COUNT = whole_number()
RANKS = whole_number(2)
CLASSES = whole_number(1, 8)
RANKS_PER_HOST = whole_number(1, 16)
SECONDS = positive("seconds", _MOST)  # calls that wait take little more
FACTOR = positive("a factor")
PART = Checked("part", _part)
SIZE = Checked("size", _size)
IN_FILE = _Place(exists=True, dir_okay=False, path_type=Path)
IN_FOLDER = _Place(exists=True, file_okay=False, path_type=Path)
SCRIPT = _Place(exists=True, dir_okay=False)
OUT_FOLDER = _Place(file_okay=False, path_type=Path)
OUT_FILE = _OutFile()
PLOT_FILE = _PlotFile()


def make_folder(option: str, path: Path) -> None:
    """Make a folder to write to, if there is none.

    Raises:
        InputError: it cannot be made, or no file in it can; the message names `option`.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{option}: got {str(path)!r}, which cannot be made a folder ({error.strerror}); give another"
        ) from None
    reason = _why_not_writable(path)
    if reason is not None:
        raise InputError(f"{option}: got {str(path)!r}, a folder in which no file can be made ({reason}); give another")


def told(option: str, path: Path) -> str:
    """`path` as the ranks are told it, in JSON.

    Raises:
        InputError: it is not UTF-8; the message names `option`.
    """
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{option}: got {text!r}, whose name is not UTF-8, expected one that is; give another") from None
    return text


def remove_files(option: str, paths: Iterable[Path], named: Iterable[str | None]) -> None:
    """Remove what an earlier run left in a folder to write to. Nothing of it may be taken for this run's.

    Args:
        option: of the folder, for the error.
        paths: the files.
        named: by the command line, which may have one of them as an input: these stay.

    Raises:
        InputError: one of them cannot be removed; the message names `option`.
    """
    inputs = {Path(name).resolve() for name in named if name is not None}
    for path in paths:
        try:
            if path.resolve() not in inputs and path.is_file():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"{option}: got {str(path.parent)!r}, whose {path.name} of an earlier run cannot be removed "
                f"({error.strerror}); give another"
            ) from None


def _why_not_writable(folder: Path) -> str | None:
    # by trying: root may do what the folder's mode denies, and cannot do what its file system does
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def rate_or_none(text: str | None) -> int | None:
    """The value of --link: a rate in bits per second, or None if links are not to be shaped."""
    with naming("--link"):
        return None if text is None or text.lower() == "none" else parse_rate(text)


def parse_time(option: str, text: str, most_ns: int = MAX_NS) -> int:
    """The value of an option that is a time, in ns.

    Raises:
        InputError: it is none, or more than `most_ns`; the message names the option.
    """
    with naming(option):
        return parse_ns(text, most_ns)
