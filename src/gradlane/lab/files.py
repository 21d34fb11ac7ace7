"""A lab's spec as a file: JSON, or YAML if PyYAML is installed; errors name the place."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gradlane.core.files import MAX_FILE_BYTES, MAX_PARTS, need_few_parts, reason_of, write_bytes
from gradlane.errors import FormatError, InputError
from gradlane.lab.spec import LabSpec

_YAML = (".yaml", ".yml")
_MAX_YAML_BYTES = 2**19  # a busy machine reads as much in 1.4 s; JSON takes a file of drawn rates in less


def read_spec(path: str | Path) -> LabSpec:
    """Read a spec from a file.

    Raises:
        FormatError: the file is not a spec; with its name and the place of the first fault.
        OSError: the file cannot be opened.
    """
    most = _MAX_YAML_BYTES if Path(path).suffix in _YAML else MAX_FILE_BYTES
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FormatError(f"{path}: got more than {most} bytes, expected at most that")
    try:
        need_few_parts(data, MAX_PARTS)
        if Path(path).suffix in _YAML:
            return msgspec.yaml.decode(data, type=LabSpec)
        return msgspec.json.decode(data, type=LabSpec)
    except ImportError as error:
        raise InputError(
            f"{path}: reading YAML needs PyYAML ({error}); install it with: pip install 'gradlane[lab]', or use JSON"
        ) from error
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `")
        raise FormatError(f"{path}: {reason_of(text)}", place.rstrip("`") or "$") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{path}: got no JSON or YAML ({error}), expected a lab's spec") from None


def write_spec(path: str | Path, spec: LabSpec) -> None:
    """Write `spec` as JSON, without fields at their defaults."""
    write_bytes(Path(path), msgspec.json.format(msgspec.json.encode(spec)) + b"\n")
