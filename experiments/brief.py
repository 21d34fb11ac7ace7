"""docs/papers.md: of each paper, its main results from experiments/notes/papers.md, and what differs.

python -m experiments.brief > docs/papers.md
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

NOTES = Path(__file__).parent / "notes" / "papers.md"


class Brief(NamedTuple):
    """What the page says of one paper.

    Attributes:
        title: of its section in the notes.
        rows: (figure, what) of the rows that are shown.
        has: the policies of the paper, and how they differ from it.
        open: what does not come out.
    """

    title: str
    rows: tuple[tuple[str, str], ...]
    has: str
    open: str


BRIEFS = (
    Brief(
        "ByteScheduler (SOSP '19)",
        (
            ("Fig. 13", "ResNet-50, 10 Gbit/s: tuned over the default"),
            ("§6.2", "vgg16, 2 machines, servers: ByteScheduler over the default"),
            ("§6.2", "vgg16, 2 machines, all-reduce: ByteScheduler over the default"),
        ),
        "`bytescheduler` slices tensors and sends them by priority, within a credit; `p3` is its predecessor. "
        "`--tune` searches both sizes, as §4.3 does. By default all ranks have one order of messages, which the "
        'plan contains; in the paper rank 0 decides it during the iteration (`order="coordinator"`).',
        "VGG-16 and the Transformer gain too little over servers, and AlexNet too much. Most of the gain comes "
        "from the default's uneven placement of tensors. With bytes spread evenly, as over gradlane's servers, "
        "VGG gains nothing at 100 Gbit/s, and ResNet-50 a third as much at 10 Gbit/s.",
    ),
    Brief(
        "MG-WFBP (TPDS '21)",
        (
            ("Fig. 6", "googlenet, 16 workers, the script's a, b: WFBP, SyncEASGD, MG-WFBP"),
            ("Fig. 9", "10GbE, resnet152, FP32: WFBP, SyncEASGD, MG-WFBP"),
            (
                "Fig. 10",
                "googlenet, the authors' recording, the script's a, b: groups at 4, 8 .. 2048 workers",
            ),
        ),
        "`mg-wfbp` merges tensors by Algorithm 1, and `mg-wfbp-exact` finds the optimal merge, which Algorithm 1 "
        "does not always. `wfbp` and `sync-easgd` are what the paper compares with. A layer of the paper is a "
        "tensor here.",
        "Fig. 10 needs the constants of the authors' script instead of those in the text (Fig. 4). Fig. 9 needs "
        "startups that nothing hides and a byte that takes twice as long; with these, SyncEASGD is still too "
        "fast.",
    ),
    Brief(
        "Prophet (ICPP '21)",
        (
            ("Table 2", "1 Gbit/s: Prophet, ByteScheduler by BytePS, P3, 4 MB"),
            ("Table 2", "3 Gbit/s: Prophet, ByteScheduler by BytePS, P3, 4 MB"),
            ("§5.3", "ResNet-18, 3 Gbit/s: the default, P3, 4 MB, Prophet"),
        ),
        "`prophet` groups gradients into blocks that end before a more urgent gradient is ready. All ranks have "
        "one plan instead of one each, and the rate is measured on messages that are sent anyway instead of every "
        "5 s.",
        "P3 is too fast: it is ahead of ByteScheduler at 1 and 2 Gbit/s, and level with Prophet at 3. With unlike "
        "links the default is twice as fast as published. At 1 Gbit/s the published rate is above what the stated "
        "links can carry.",
    ),
    Brief(
        "Geryon (INFOCOM '20)",
        (
            ("Fig. 5", "the urgent parameter's time with classes in the network, of that without"),
            ("Table II", "vgg19, 10 Gbit/s: vanilla, partition and slicing, Geryon"),
            ("Table III", "vgg19, 40 Gbit/s: vanilla, partition and slicing, Geryon"),
        ),
        "`geryon` sends slices in lanes that the network serves by priority, and `tictac` orders whole tensors. "
        'The threshold is given, tuned, or found in the simulator (`threshold="auto"`) instead of fitted to the '
        "first iterations.",
        "At 40 Gbit/s every value is 2 to 13 points too high. Slices fall as far behind as published only if "
        "servers return sums late and in random order, as TensorFlow does and gradlane does not.",
    ),
    Brief(
        "Mercury (TPDS '23)",
        (
            ("Fig. 13", "10 Gbit/s, 2 to 4 workers: Mercury over the default, at most"),
            ("Fig. 13", "over ByteScheduler, at most"),
            ("Fig. 13", "Mercury over BytePS, others with 73 % of the link's rate, at most"),
        ),
        "`mercury` sends one message for each tensor and orders its packets, over gradlane's own servers; "
        "`mercury-no-preemption` is the paper's comparison. Urgency is the recorded first use of a parameter, not "
        "its place in the model, and servers return sums by priority too.",
        "The gain over the default is half of the published one, and the gain over a tuned ByteScheduler almost "
        "nothing. The latter is near the published one if ByteScheduler gets the 73 % of the link's rate that the "
        "paper measures for it.",
    ),
)

HEAD = """\
# The papers' results, beside gradlane's

For readers of the five papers whose schedules gradlane has: which policy is whose, what comes out here as published, and what
does not. [The notes](../experiments/notes/papers.md) have every value, the assumptions and what was tried to explain each
difference. Nothing that is counted was fitted to a published figure.

The table counts values. "Within 5" and "within 15" are percent, or points where the value is a percentage. "Wrong": a
published gain is a loss here, or two systems change places ([which](../experiments/notes/papers.md#wrong-in-sign-or-order)).
"""
LAB = """\
## Measured in the lab

The main claims were also run: real processes and sockets, emulated devices and links, on two cores. "Simulated" is here the
plan that ran, on the network that the run measured. Servers share the bytes evenly there, so the first row differs from
ByteScheduler's Fig. 13 above.
"""
FOOT = """\
`python -m experiments --write experiments/notes/papers.md --plots experiments/notes/figures` makes the notes, in about three
minutes, and then `python -m experiments.brief > docs/papers.md` makes this page. Name a paper for its tables alone:
`python -m experiments mercury`.
"""


def page(notes: str) -> str:
    """The page for docs/.

    Args:
        notes: the text of `NOTES`.

    Raises:
        KeyError: the notes lack a section or a row.
    """
    sections = {}
    for part in notes.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        sections[title] = [line for line in body.splitlines() if line.startswith("|")]
    lab = sections["In the lab"]
    claims = lab[: next((at for at, line in enumerate(lab) if at and line.startswith("| figure |")), len(lab))]
    counts = [line for line in notes.partition("\n## ")[0].splitlines() if line.startswith("|")]
    parts = [HEAD, *counts, ""]
    for brief in BRIEFS:
        lines = sections[brief.title]
        found = {tuple(line.strip("| ").split(" | ")[:2]): line for line in lines}
        shown = [*lines[:2], *(found[row] for row in brief.rows)]
        parts += [f"## {brief.title}\n", _wrapped(brief.has), _wrapped(f"**What does not come out.** {brief.open}"), *shown, ""]
    return "\n".join([*parts, LAB, *claims, "", FOOT])


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 124, break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    print(page(NOTES.read_text()), end="")
