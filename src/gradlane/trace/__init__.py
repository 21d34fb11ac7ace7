"""Profiles from what other tools recorded, one module for each format (docs/traces.md).

A trace is an untrusted file: it is read up to a limit, every number is checked, and what cannot be
used raises `FormatError` with the place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gradlane.core.profile import Profile, TensorSpec
from gradlane.errors import FormatError, InputError
from gradlane.trace import chakra, kineto, mg_wfbp, pipedream
from gradlane.trace.mg_wfbp import read_allreduce
from gradlane.trace.source import load

__all__ = ["FORMATS", "read", "read_allreduce"]

_IS: dict[str, Callable[[bytes], bool]] = {
    "kineto": kineto.is_it,
    "chakra": chakra.is_it,
    "pipedream": pipedream.is_it,
    "mg-wfbp": mg_wfbp.is_it,
}
FORMATS = tuple(_IS)


def read(
    path: str | Path,
    *,
    format: str | None = None,
    tensors: Sequence[TensorSpec] | None = None,
    compute_ns: int | None = None,
) -> Profile:
    """Read a profile from a trace, gzipped or not.

    Args:
        path: the file.
        format: one of `FORMATS`; None: recognized from the contents.
        tensors: names for the gradients, in order of readiness (kineto, chakra: their gradients
            have no names). Sizes must match the trace's, if it has sizes.
        compute_ns: forward and backward together, for a trace without times (chakra).

    Raises:
        InputError: `tensors` or `compute_ns` for a format that does not need it.
        FormatError: the file cannot be used; with the place.
        OSError: the file cannot be opened.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"format: got {format!r}, expected one of {', '.join(FORMATS)}")
    data = load(path)
    found = format or next((name for name, is_it in _IS.items() if is_it(data[:65_536])), None)
    if found is None:
        raise FormatError(f"{path}: got a file of no known format, expected one of {', '.join(FORMATS)}")
    if compute_ns is not None and found != "chakra":
        raise InputError(f"compute_ns: got it for a {found} file, expected none: it has times of its own")
    if tensors is not None and found not in ("kineto", "chakra"):
        raise InputError(f"tensors: got them for a {found} file, expected none: its layers have names of their own")
    # a model is named for its file, up to the first point
    name = Path(path).name.lstrip(".").encode(errors="replace").decode()
    if found == "kineto":
        return kineto.read(data, name, tensors)
    if found == "chakra":
        return chakra.read(data, name, tensors, compute_ns)
    if found == "pipedream":
        return pipedream.read(data, name)
    return mg_wfbp.read(data, name)
