"""Timelines as SVG: what a rank computed, and below it the messages, on one scale of time.

A message is a thin line from ready to start, a bar until it has left its first phase, and a paler one
until it has arrived. Kinds of computing and urgency have the colours of the report. A picture brings
its own paper, white or dark as the reader's browser asks for, and no script. Where it is drawn as narrow as a
telephone, its words are larger, and the key is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import NamedTuple

from gradlane.core.plan import Plan
from gradlane.report.page.facts import COMPUTE_KINDS, RankBars

WIDTH, LEFT, RIGHT, EDGE = 960, 104, 16, 12
HEADING, COMPUTE, GAP, AXIS = 30, 26, 8, 40
TRACK, THIN_TRACK, LANE = 20, 5, 170  # heights: of a track with words, the least, and of all tracks of a lane
LETTER = 7.9  # width of one, about

_STYLE = """\
  text { font: 15px system-ui, sans-serif; fill: #1c2430; } .faint { fill: #647083; }
  .head { font-weight: 600; font-size: 17px; }
  .paper { fill: #ffffff; } .line { stroke: #c3cad5; } .queued { stroke: #95a1b3; } .on { fill: #10151c; font-size: 13px; }
  .forward { fill: #7db8f0; } .backward { fill: #a79fe6; } .update { fill: #5cc4a3; } .wait { fill: #e5484d; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e9f0; } .faint { fill: #95a1b3; } .paper { fill: #14181f; } .line { stroke: #4a5463; }
    .on { fill: #10151c; }
  }
  @media (max-width: 500px) { text { font-size: 19px; } .head { font-size: 27px; } .key { display: none; } }"""


@dataclass(frozen=True)
class Row:
    """One rank under one plan.

    Attributes:
        name, said: the heading, and what stands at its right end.
        plan: what the bars' messages are of.
        bars: what the rank did.
        steps: flat, start and end of each iteration, in us. What lies before the first or after the
            last is cut off.
        urgencies: of the plan's messages (`gradlane.report.page.drawing.urgencies`).
        layers: names of the profile's layers, for words on the bars; empty for bars without words.
    """

    name: str
    said: str
    plan: Plan
    bars: RankBars
    steps: Sequence[int]
    urgencies: Sequence[int]
    layers: Sequence[str] = ()


class Message(NamedTuple):
    """A message's times, in us."""

    number: int
    ready: int
    start: int
    left: int
    end: int


def timelines(title: str, rows: Sequence[Row]) -> str:
    """Rows below one another, as an SVG document.

    Args:
        title: for those who do not see it.
        rows: one or more.
    """
    last_us = max(row.steps[-1] - row.steps[0] for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / last_us
    parts: list[str] = []
    top = float(EDGE)
    for row in rows:
        drawn, height = _row(row, top, scale)
        parts += drawn
        top += height
    parts += _axis(top, scale, last_us)
    height = round(top + AXIS + 22 + EDGE)
    parts += ['<g class="key">', *_key(height - EDGE - 8), "</g>"]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def messages_of(row: Row) -> list[Message]:
    """The messages of a row, by start, as far as they are shown."""
    indices, _, starts, waits, firsts, seconds = row.bars.messages
    times = zip(indices, accumulate(starts), waits, firsts, seconds, strict=True)
    cut = [
        Message(index, *_cut(row, start - waited, start, start + first, start + first + second))
        for index, start, waited, first, second in times
    ]
    return [message for message in cut if message.end > message.start]


def _row(row: Row, top: float, scale: float) -> tuple[list[str], float]:
    parts = [f'<text class="head" x="{EDGE}" y="{top + 20:.0f}">{escape(row.name)}</text>']
    parts.append(f'<text class="head" x="{WIDTH - RIGHT}" y="{top + 20:.0f}" text-anchor="end">{escape(row.said)}</text>')
    begun = at = top + HEADING
    parts.append(f'<text class="faint" x="{EDGE}" y="{at + 18:.0f}">computes</text>')
    parts += _computing(row, at, scale)
    at += COMPUTE + GAP
    lanes: dict[int, list[Message]] = {}
    for message in messages_of(row):
        lanes.setdefault(row.plan.messages[message.number].lane, []).append(message)
    for lane, messages in sorted(lanes.items()):
        parts.append(
            f'<text class="faint" x="{EDGE}" y="{at + 15:.0f}">{"sends" if len(lanes) == 1 else f"lane {lane}"}</text>'
        )
        drawn, height = _lane(row, messages, at, scale)
        parts += drawn
        at += height + GAP
    edges = sorted({edge - row.steps[0] for edge in row.steps})
    lines = [f'<path class="line" d="M{LEFT + edge * scale:.1f} {begun - 3:.0f}V{at:.0f}"/>' for edge in edges]
    return lines + parts, at - top + GAP


def _cut(row: Row, *times: int) -> list[int]:
    """Times from the row's first, no later than its last."""
    return [min(max(time, row.steps[0]), row.steps[-1]) - row.steps[0] for time in times]


def _computing(row: Row, top: float, scale: float) -> Iterator[str]:
    kinds, subjects, starts, lengths = row.bars.compute
    for kind, subject, begun, took in zip(kinds, subjects, accumulate(starts), lengths, strict=True):
        name = COMPUTE_KINDS[kind]
        start, end = _cut(row, begun, begun + took)
        length = end - start
        if not length:
            continue
        inner = 5 if name == "update" else 0
        yield _box(f'class="{name}"', start, length, top + inner, COMPUTE - 2 * inner, scale)
        if row.layers and name in ("forward", "backward"):
            word = row.layers[subject] if subject >= 0 else name if name == "backward" else ""
            yield from _word(word, start, length, top + 17, scale)


def _lane(row: Row, messages: Sequence[Message], top: float, scale: float) -> tuple[list[str], float]:
    """Messages that are in flight together go on tracks below one another."""
    ends: list[int] = []
    tracks = []
    for message in messages:
        track = next((track for track, end in enumerate(ends) if end <= message.start), len(ends))
        ends[track : track + 1] = [message.end]
        tracks.append(track)
    each = min(TRACK, max(THIN_TRACK, LANE // len(ends)))
    colours = _colours(row.urgencies)
    queued, parts = [], []
    for message, track in zip(messages, tracks, strict=True):
        at = top + track * each
        if message.start > message.ready:
            ready, start = (LEFT + time * scale for time in (message.ready, message.start))
            queued.append(f'<path class="queued" d="M{ready:.1f} {at + each / 2:.1f}H{start:.1f}"/>')
        fill = f'fill="{colours[message.number]}"'
        parts.append(_box(fill, message.start, message.left - message.start, at, each - 1, scale))
        if message.end > message.left:
            parts.append(_box(f'{fill} opacity="0.6"', message.left, message.end - message.left, at, each - 1, scale))
        if row.layers and each == TRACK:
            parts += _word(_carried(row.plan, message.number), message.start, message.end - message.start, at + 14, scale)
    return queued + parts, each * len(ends)


def _colours(urgencies: Sequence[int]) -> list[str]:
    """A colour for each message, from yellow for the most urgent to blue."""
    place_of = {each: place for place, each in enumerate(sorted(set(urgencies)))}
    return [_colour(place_of[each] / max(1, len(place_of) - 1)) for each in urgencies]


def _colour(part: float) -> str:
    return f"hsl({48 + 162 * part:.0f} 75% 60%)"


def _carried(plan: Plan, index: int) -> str:
    """The tensors of a message in few letters; a part of a tensor has a prime for each part before it."""
    pieces = plan.messages[index].slices
    names = [plan.tensors[piece.tensor].name for piece in pieces]
    if len(pieces) > 1:
        return f"{names[0]} .. {names[-1]}"
    before = {
        piece.offset_bytes
        for message in plan.messages
        for piece in message.slices
        if piece.tensor == pieces[0].tensor and piece.offset_bytes < pieces[0].offset_bytes
    }
    return names[0] + "'" * len(before)


def _box(look: str, start: int, length: int, top: float, height: float, scale: float) -> str:
    at = f'x="{LEFT + start * scale:.1f}" y="{top:.1f}" width="{max(0.6, length * scale - 0.5):.1f}" height="{height:.1f}"'
    return f"<rect {look} {at}/>"


def _word(word: str, start: int, length: int, base: float, scale: float) -> Iterator[str]:
    if word and len(word) * LETTER < length * scale:
        middle = LEFT + (start + length / 2) * scale
        yield f'<text class="on" x="{middle:.1f}" y="{base:.1f}" text-anchor="middle">{escape(word)}</text>'


def _axis(top: float, scale: float, last_us: int) -> Iterator[str]:
    step = next(unit for power in range(10) for unit in (10**power, 2 * 10**power, 5 * 10**power) if last_us / unit <= 8)
    for time in range(0, last_us + 1, step):
        x = LEFT + time * scale
        yield f'<path class="line" d="M{x:.1f} {top:.0f}v5"/>'
        label = f"{time / 1000:g}" + (" ms" if not time else "")
        yield f'<text class="faint" x="{x:.1f}" y="{top + 20:.0f}" text-anchor="middle">{label}</text>'


def _key(base: float) -> Iterator[str]:
    x = float(LEFT)
    kinds = {"forward": "forward", "backward": "backward", "update": "update", "wait": "waits for the network"}
    for kind, word in kinds.items():
        yield f'<rect class="{kind}" x="{x:.0f}" y="{base - 10:.0f}" width="12" height="12"/>'
        yield f'<text class="faint" x="{x + 17:.0f}" y="{base + 1:.0f}">{word}</text>'
        x += 34 + LETTER * len(word)
    words = "messages: needed first"
    yield f'<text class="faint" x="{x:.0f}" y="{base + 1:.0f}">{words}</text>'
    x += 8 + LETTER * len(words)
    for place in range(12):
        yield f'<rect fill="{_colour(place / 11)}" x="{x + 7 * place:.0f}" y="{base - 10:.0f}" width="7" height="12"/>'
    yield f'<text class="faint" x="{x + 92:.0f}" y="{base + 1:.0f}">needed last</text>'
