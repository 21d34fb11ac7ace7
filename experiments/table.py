"""Rows of published beside simulated, and the page they make."""

from __future__ import annotations

from typing import NamedTuple

Values = float | tuple[float, ...] | str | None


class Row(NamedTuple):
    """A result: one value, a tuple of values that belong together, or words.

    published: None where the paper has it in a plot only.
    unit: of every value. "%" is compared in percentage points, other units relatively.
    counts: whether the head of the page counts the row. Not where it tries a remark's cause, or
        shows a figure once more with other inputs.
    """

    figure: str
    what: str
    published: Values
    ours: Values
    unit: str = ""
    counts: bool = True


def pairs(row: Row) -> list[tuple[float, float]]:
    """(published, ours) of each number that has both."""
    published, ours = _numbers(row.published), _numbers(row.ours)
    return list(zip(published, ours, strict=True)) if published and ours else []


def difference(row: Row) -> str:
    if row.published is None:
        return ""
    found = pairs(row)
    if not found:
        return "same" if row.published == row.ours else "other"
    if row.unit == "%":
        return " ".join(f"{ours - published:+.1f}" for published, ours in found) + " points"
    return " ".join(f"{ours / published - 1:+.0%}" for published, ours in found)


def text(value: Values, unit: str) -> str:
    if value is None:
        return "plot"
    if isinstance(value, str):
        return value
    numbers = " ".join(
        f"{each:.1f}" if unit == "%" else f"{each:.3g}" if each < 1000 else f"{each:.0f}" for each in _numbers(value)
    )
    return f"{numbers} {unit}".strip()


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


def _numbers(value: Values) -> tuple[float, ...]:
    if value is None or isinstance(value, str):
        return ()
    return value if isinstance(value, tuple) else (value,)
