"""The papers' figures as pictures: what is published beside what is simulated, in the papers' axes.

`python -m experiments --plots` draws them as SVG. They take their values from the rows of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.assumptions import GBIT
from experiments.table import Row, pairs

PUBLISHED = "published"
_APART = 0.16  # of points that belong to one name, where names are 1 apart


class Line(NamedTuple):
    """Points of one colour; those with the label of another line and `published` are its published ones."""

    label: str
    points: list[tuple[float, float]]
    published: bool = False


class Picture(NamedTuple):
    """names: of x = 0, 1, ... where it counts things; a line joins points only where it does not."""

    stem: str
    title: str
    x: str
    y: str
    lines: list[Line]
    names: tuple[str, ...] = ()
    log_x: bool = False
    log_y: bool = False


def pictures(module: str, rows: list[Row]) -> list[Picture]:
    """Of one paper, by the name of its module."""
    return list(_OF[module](rows))


def draw(picture: Picture, folder: Path) -> Path:
    """Write a picture as SVG and return its path. The same values make the same file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    settings: Any = {"svg.hashsalt": picture.stem, "svg.fonttype": "none", "font.size": 9, "axes.prop_cycle": _CYCLE}
    with pyplot.rc_context(settings):
        width = 5.5 if not picture.names else max(5.5, 0.55 * len(picture.names) + 2)
        figure, axis = pyplot.subplots(figsize=(width, 3.6), layout="constrained")
        colours: dict[str, Any] = {}
        for line in picture.lines:
            colour = colours.setdefault(line.label, "0.15" if line.label == PUBLISHED else f"C{len(colours)}")
            style = ("" if picture.names else "--" if line.published else "-") + "o"
            x, y = zip(*line.points, strict=True)
            axis.plot(
                x, y, style, color=colour, markerfacecolor="none" if line.published else colour, markersize=5, linewidth=1.2
            )
        handles = [Line2D([], [], marker="o", color=colour, label=label) for label, colour in colours.items()]
        if any(line.published for line in picture.lines) and PUBLISHED not in colours:
            handles.append(
                Line2D(
                    [], [], marker="o", color="0.4", markerfacecolor="none", linestyle="--", label="published (open, dashed)"
                )
            )
        axis.set(title=picture.title, xlabel=picture.x, ylabel=picture.y)
        if picture.log_x:
            axis.set_xscale("log", base=2)
            ticks = sorted({x for line in picture.lines for x, _ in line.points})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if picture.log_y:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        if picture.names:
            turned: Any = {"rotation": 30, "ha": "right"} if max(map(len, picture.names)) > 9 else {}
            axis.set_xticks(range(len(picture.names)), picture.names, **turned)
        axis.grid(alpha=0.25)
        axis.legend(handles=handles, fontsize="small")
        path = folder / f"{picture.stem}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return path


def _bytescheduler(rows: list[Row]) -> Iterator[Picture]:
    found = [row for row in rows if row.figure in ("§6.2", "Fig. 13") and row.counts and not isinstance(row.published, str)]
    names = tuple(row.what.partition(": ")[0] for row in found)
    yield _counted(
        "bytescheduler-gains", "ByteScheduler §6.2 and Fig. 13", "faster than the default, %", found, names, ("gain",)
    )


def _mg_wfbp(rows: list[Row]) -> Iterator[Picture]:
    for model in ("googlenet", "resnet50"):
        lines: list[Line] = []
        for row in rows:
            what, _, groups = row.what.partition(": groups at ")
            if groups and row.figure == "Fig. 10" and what.startswith(model):
                both = pairs(row)
                if not lines:
                    lines.append(Line(PUBLISHED, _by_workers([published for published, _ in both]), published=True))
                lines.append(Line(what.partition(", ")[2], _by_workers([ours for _, ours in both])))
        title = f"MG-WFBP Fig. 10, {model}: groups after merging"
        yield Picture(f"mg-wfbp-fig10-{model}", title, "workers", "groups", lines, log_x=True, log_y=True)
    for figure in ("Fig. 6", "Fig. 7"):
        found = [row for row in rows if row.figure == figure and row.counts]
        model = found[0].what.partition(",")[0]
        title = f"MG-WFBP {figure}, {model}, the script's a and b"
        yield _swept(f"mg-wfbp-{_slug(figure)}", title, "workers", "images a second", found, r"(\d+) workers")
    for cluster in ("10GbE", "56GbIB"):
        found = [
            row for row in rows if row.figure == "Fig. 9" and row.counts and row.unit == "s" and row.what.startswith(cluster)
        ]
        names = tuple(" ".join(row.what.partition(": ")[0].split(", ")[1:]) for row in found)
        yield _counted(
            f"mg-wfbp-fig9-{cluster.lower()}",
            f"MG-WFBP Fig. 9, {cluster}",
            "seconds an iteration",
            found,
            names,
            _labels(found[0]),
        )


def _prophet(rows: list[Row]) -> Iterator[Picture]:
    found = [row for row in rows if row.figure == "Table 2" and row.counts and row.published is not None]
    yield _swept("prophet-table2", "Prophet Table 2, ResNet-50", "Gbit/s", "samples a second", found, r"([\d.]+) Gbit/s")
    found = [row for row in rows if row.figure == "Table 3" and row.counts]
    names = tuple(row.what.partition(", 3 Gbit/s")[0] for row in found)
    title = "Prophet Table 3, 3 Gbit/s"
    yield _counted("prophet-table3", title, "samples a second", found, names, _labels(found[0]))


def _geryon(rows: list[Row]) -> Iterator[Picture]:
    for table, figure in (("Table II", "Fig. 8"), ("Table III", "Fig. 9")):
        found = [row for row in rows if row.figure == table and row.counts and row.unit == "%"]
        names = tuple(row.what.partition(",")[0] for row in found)
        rate = found[0].what.partition(", ")[2].partition(":")[0]
        title = f"Geryon {table} (its {figure}), {rate}"
        yield _counted(f"geryon-{_slug(table)}", title, "scaling efficiency, %", found, names, _labels(found[0]))


def _mercury(rows: list[Row]) -> Iterator[Picture]:
    # the paper shows curves; the page has their least and most only
    from experiments.mercury import RATES, figure_11

    for model in ("vgg16", "bert-base"):
        lines = [
            Line(label, [(rate / GBIT, ratio) for rate, ratio in zip(RATES, ratios, strict=True)])
            for label, ratios in figure_11(model).items()
        ]
        title = f"Mercury Fig. 11, {model}: simulated"
        yield Picture(f"mercury-fig11-{model}", title, "Gbit/s", "computing / iteration", lines, log_x=True)
    found = [row for row in rows if row.figure == "Fig. 13" and row.counts]
    names = tuple(row.what.rpartition("over ")[2].partition(",")[0] for row in found)
    title = "Mercury Fig. 13, 10 Gbit/s: gain at most, over"
    yield _counted("mercury-fig13", title, "gain, %", found, names, ("Mercury",))


def _by_workers(values: list[float]) -> list[tuple[float, float]]:
    """Of 4, 8, ... workers."""
    return [(float(2 ** (2 + place)), value) for place, value in enumerate(values)]


def _swept(stem: str, title: str, x: str, y: str, rows: list[Row], pattern: str) -> Picture:
    """A line for each value of a row, over the number that `pattern` finds in the rows' words."""
    places = []
    for row in rows:
        number = re.search(pattern, row.what)
        assert number is not None, row.what
        places.append(float(number[1]))
    return Picture(stem, title, x, y, _lines(rows, places, _labels(rows[0])), log_x=True)


def _counted(stem: str, title: str, y: str, rows: list[Row], names: tuple[str, ...], labels: tuple[str, ...]) -> Picture:
    """A point for each value of a row, one row beside another."""
    lines = _lines(rows, [float(place) for place in range(len(rows))], labels)
    # those of a row stand beside one another, so that equal ones can be told apart
    apart = [(nth // 2 - (len(labels) - 1) / 2) * _APART for nth in range(len(lines))]
    lines = [
        line._replace(points=[(place + by, value) for place, value in line.points])
        for line, by in zip(lines, apart, strict=True)
    ]
    return Picture(stem, title, "", y, lines, names)


def _lines(rows: list[Row], places: list[float], labels: tuple[str, ...]) -> list[Line]:
    lines = []
    for nth, label in enumerate(labels):
        both = [(place, *pairs(row)[nth]) for place, row in zip(places, rows, strict=True)]
        lines.append(Line(label, [(place, ours) for place, _, ours in both]))
        lines.append(Line(label, [(place, published) for place, published, _ in both], published=True))
    return lines


def _labels(row: Row) -> tuple[str, ...]:
    """What the values of a row are of: the words after its last colon."""
    words = row.what.rpartition(": ")[2].replace("ByteScheduler, fixed knobs", "ByteScheduler").replace("P3, 4 MB", "P3")
    return tuple(words.split(", "))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", text.lower())


_CYCLE = "cycler('color', ['#2563eb', '#d97706', '#059669', '#9333ea', '#dc2626', '#475569'])"  # as a style file has it
_OF: dict[str, Callable[[list[Row]], Iterator[Picture]]] = {
    "bytescheduler": _bytescheduler,
    "mg_wfbp": _mg_wfbp,
    "prophet": _prophet,
    "geryon": _geryon,
    "mercury": _mercury,
}
