"""Line plots, for `--plot`. matplotlib is an extra and is imported when a plot is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradlane.errors import UnsupportedError

Lines = Mapping[str, Sequence[tuple[float, float]]]


def draw(path: Path, panels: Mapping[str, Lines], x: str, y: str, log_x: bool = False) -> None:
    """Write panels of lines side by side to a file, whose suffix decides the format.

    Args:
        path: the file.
        panels: by title, the lines of each panel by name.
        x, y: labels of the axes.
        log_x: whether the x axis is logarithmic.

    Raises:
        UnsupportedError: matplotlib is not installed or does not know the suffix.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UnsupportedError(f"--plot needs matplotlib ({error}); install it with: pip install 'gradlane[plot]'") from error
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.2), squeeze=False, layout="constrained")
    try:
        kinds = figure.canvas.get_supported_filetypes()
        if path.suffix[1:] not in kinds:
            raise UnsupportedError(f"--plot: got {path.name!r}, expected a suffix such as .svg, .png or .pdf")
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
        figure.savefig(path)
    finally:
        pyplot.close(figure)
