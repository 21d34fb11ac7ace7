"""Line plots, for `--plot`. matplotlib is an extra and is imported when a plot is drawn."""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradlane.core import files
from gradlane.errors import UnsupportedError

PLOT_SUFFIXES = (".svg", ".png", ".pdf")
Lines = Mapping[str, Sequence[tuple[float, float]]]


def need_matplotlib() -> None:
    """Raise `UnsupportedError` if matplotlib is not installed. Does not import it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise _no_matplotlib("No module named 'matplotlib'")


def _no_matplotlib(reason: str) -> UnsupportedError:
    return UnsupportedError(f"--plot needs matplotlib ({reason}); install it with: pip install 'gradlane[plot]'")


def draw(path: Path, panels: Mapping[str, Lines], x: str, y: str, log_x: bool = False) -> None:
    """Write panels of lines side by side to a file, whose suffix decides the format.

    Args:
        path: the file, with one of `PLOT_SUFFIXES`.
        panels: by title, the lines of each panel by name.
        x, y: labels of the axes.
        log_x: whether the x axis is logarithmic.

    Raises:
        UnsupportedError: matplotlib cannot be imported.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise _no_matplotlib(str(error)) from error
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.2), squeeze=False, layout="constrained")
    try:
        for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
            for points in lines.values():
                axis.plot([point[0] for point in points], [point[1] for point in points], marker=".")
            # names are as they are: matplotlib would take what is between two dollars for a formula
            axis.set_title(title, parse_math=False)
            axis.set_xlabel(x, parse_math=False)
            axis.set_ylabel(y, parse_math=False)
            if log_x:
                axis.set_xscale("log")
            axis.grid(alpha=0.3)
            # given with their lines, as names that begin with "_" would be left out
            for name in axis.legend(axis.get_lines(), list(lines), fontsize="small").get_texts():
                name.set_parse_math(False)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=path.suffix.removeprefix("."))
    finally:
        pyplot.close(figure)
    files.write_bytes(path, drawn.getvalue())
