"""Rows of published beside simulated, and the page they make."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A quantitative result. published: None where the paper has it in a plot only, or says it in words."""

    figure: str
    what: str
    published: float | str | None
    ours: float | str
    unit: str = ""


def difference(row: Row) -> str:
    if isinstance(row.published, str) or isinstance(row.ours, str):
        if row.published is None:
            return ""
        return "same" if row.published == row.ours else "other"
    if row.published is None:
        return ""
    if row.unit == "%":
        return f"{row.ours - row.published:+.1f} points"
    return f"{row.ours / row.published - 1:+.0%}"


def text(value: float | str | None, unit: str) -> str:
    if value is None:
        return "plot"
    if isinstance(value, str):
        return value
    return f"{value:.3g} {unit}".strip() if unit != "%" else f"{value:.1f} %"


def page(sections: list[tuple[str, str, list[Row]]]) -> str:
    """(title, remarks, rows) as Markdown."""
    lines = []
    for title, remarks, rows in sections:
        lines += [f"## {title}", "", "| figure | what | published | simulated | difference |", "|---|---|---|---|---|"]
        for row in rows:
            cells = (row.figure, row.what, text(row.published, row.unit), text(row.ours, row.unit), difference(row))
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", remarks.strip(), ""]
    return "\n".join(lines)
