"""Rows of published beside simulated, and the page they make."""

from __future__ import annotations

import re
from itertools import combinations
from typing import NamedTuple

_NUMBER = r"(-?\d+(?:\.\d+)?)"
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
        return "same" if _same(row) else "other"
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


class Count(NamedTuple):
    """How the counted rows of a paper compare."""

    compared: int
    within_5: int
    within_15: int
    wrong: int


def count(rows: list[Row]) -> Count:
    """Values that have a published one beside them.

    A value in percent is within 5 if it is within 5 points, any other within 5 %. Words are within
    if they are the same, or if the published ones are a range ("28 to 51 %") that has all of ours.
    A value is wrong in sign if it is a loss where a gain is published or the other way round, and
    two values of a row are wrong in order if either is ahead of the other by more than 2 % here and
    behind it by as much in the paper.
    """
    compared = within_5 = within_15 = 0
    for row in filter(_is_compared, rows):
        found = pairs(row)
        off = [abs(ours - published) if row.unit == "%" else 100 * abs(ours / published - 1) for published, ours in found]
        if not found:
            off = [0.0 if _same(row) else float("inf")]
        compared += len(off)
        within_5 += sum(each <= 5 for each in off)
        within_15 += sum(each <= 15 for each in off)
    return Count(compared, within_5, within_15, sum(map(_wrong, rows)))


def _is_compared(row: Row) -> bool:
    return row.counts and row.published is not None


def _wrong(row: Row) -> int:
    """How many values are wrong in sign, and pairs of values in order; 0 for a row that does not count."""
    if not _is_compared(row):
        return 0
    found = pairs(row)
    neutral = {"x": 1.0, "%": 0.0}.get(row.unit)
    signs = 0 if neutral is None else sum((published - neutral) * (ours - neutral) < 0 for published, ours in found)
    return signs + sum(_orders_differ(first, second) for first, second in combinations(found, 2))


def wrong_rows(papers: list[tuple[str, list[Row]]]) -> str:
    """(paper, rows) as Markdown: the rows with values that are wrong in sign or order."""
    lines = ["| paper | figure | what | published | simulated | wrong |", "|---|---|---|---|---|---|"]
    for name, rows in papers:
        for row in rows:
            if wrong := _wrong(row):
                cells = (name, row.figure, row.what, text(row.published, row.unit), text(row.ours, row.unit), str(wrong))
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _same(row: Row) -> bool:
    """Of a row in words."""
    span = re.fullmatch(rf"{_NUMBER} to {_NUMBER} %", str(row.published))
    ours = re.fullmatch(rf"{_NUMBER}( {_NUMBER})* %", str(row.ours))
    if not (span and ours):
        return row.published == row.ours
    return all(float(span[1]) <= float(each) <= float(span[2]) for each in str(row.ours).split()[:-1])


def _orders_differ(first: tuple[float, float], second: tuple[float, float]) -> bool:
    there, here = first[0] / second[0] - 1, first[1] / second[1] - 1
    return there * here < 0 and min(abs(there), abs(here)) > 0.02


def summary(papers: list[tuple[str, int, int, list[Row]]]) -> str:
    """(paper, published values, those not compared for a reason, rows) as Markdown: how many values agree."""
    header = ("paper", "values published", "not compared", "compared", "within 5", "within 15", "wrong in sign or order")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    total = [0] * 6
    for name, published, left, rows in papers:
        cells = [published, left, *count(rows)]
        total = [before + each for before, each in zip(total, cells, strict=True)]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "| all | " + " | ".join(map(str, total)) + " |", ""])


def _numbers(value: Values) -> tuple[float, ...]:
    if value is None or isinstance(value, str):
        return ()
    return value if isinstance(value, tuple) else (value,)
