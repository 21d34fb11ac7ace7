"""Draws a flame graph, as an SVG, of what `perf script` prints on standard input.

    perf record -a -e cpu-clock -F 499 -g -o perf.data -- COMMAND
    perf script -i perf.data --comm gradlane-io -F comm,ip,sym | python -m bench.flame "TITLE" FILE.svg

A box is a function, and stands on the function that called it. Its width is the share of the samples in which it ran or
waited for what it had called; a pointer over it shows the share in per cent. "gradlane-io" is the I/O thread of a node.
For the names of gradlane's own functions, install without stripping them:

    pip install --no-deps -e . -C install.strip=false -C cmake.define.CMAKE_CXX_FLAGS=-fno-omit-frame-pointer
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH, ROW, CHARACTER = 1200, 17, 6.6  # pixels; the last: of a character of the labels
LEAST = 0.003  # of all samples: a narrower box is left out
COLOURS = {"kernel": "#e8b06a", "gradlane": "#7fb3d5", "other": "#d5d8dc"}
_FRAME = re.compile(r"\s+([0-9a-f]+) (.*)")
_ARGUMENTS = re.compile(r"\(.*|<.*")


@dataclass
class Box:
    """A function on one path of calls."""

    kind: str = "other"
    samples: int = 0
    calls: dict[str, Box] = field(default_factory=dict)


def stacks(lines: Iterable[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield for each sample its calls, outermost first, as (kind, name). Frames without a name are left out."""
    frames: list[tuple[str, str]] = []
    for line in lines:
        found = _FRAME.match(line)
        if found is None:
            if frames:
                yield frames[::-1]
            frames = []
            continue
        address, name = found.group(1), found.group(2).strip()
        if name == "[unknown]":
            continue
        ours = name.startswith("gradlane::")
        kind = "kernel" if address.startswith("ffff") else "gradlane" if ours else "other"
        name = name.removeprefix("gradlane::").replace("(anonymous namespace)::", "")
        frames.append((kind, _ARGUMENTS.sub("", name) or name))
    if frames:
        yield frames[::-1]


def tree(samples: Iterable[list[tuple[str, str]]]) -> Box:
    """Add all samples up, from the outermost calls inwards."""
    root = Box()
    for frames in samples:
        root.samples += 1
        box = root
        for kind, name in frames:
            box = box.calls.setdefault(name, Box(kind))
            box.samples += 1
    return root


def boxes(box: Box, total: int, left: float, level: int) -> Iterator[tuple[float, float, int, str, Box]]:
    """Yield (left edge and width as shares of all samples, level, name, box) of all that `box` has called."""
    for name, called in sorted(box.calls.items()):
        width = called.samples / total
        if width >= LEAST:
            yield left, width, level, name, called
            yield from boxes(called, total, left, level + 1)
        left += width


def svg(title: str, root: Box) -> str:
    """The flame graph as the text of an SVG file."""
    drawn = list(boxes(root, root.samples, 0.0, 0))
    height = (max((level for _, _, level, _, _ in drawn), default=0) + 3) * ROW
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="4" y="13">{escape(title)} ({root.samples} samples)</text>',
    ]
    for left, width, level, name, box in drawn:
        x, y, w = left * WIDTH, height - (level + 1) * ROW, width * WIDTH
        fits = int((w - 4) / CHARACTER)
        label = name if len(name) <= fits else name[: fits - 1] + "…" if fits > 3 else ""
        text = f'<text x="{x + 2:.1f}" y="{y + 12}">{escape(label)}</text>' if label else ""
        rect = f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{ROW - 1}" fill="{COLOURS[box.kind]}"/>'
        out.append(f"<g><title>{escape(name)}: {width:.1%}</title>{rect}{text}</g>")
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    root = tree(stacks(sys.stdin))
    if not root.samples:
        sys.exit("bench.flame: no sample on standard input")
    Path(sys.argv[2]).write_text(svg(sys.argv[1], root))


if __name__ == "__main__":
    main()
