"""Published values that have no simulated one beside them, and why.

With the rows of a paper they account for every value that the paper or its authors' scripts state.
"""

from __future__ import annotations

from typing import NamedTuple

INPUT = "an input: the simulation starts from it"
NO_NUMBER = "a plot without numbers in the text"
NO_MODEL = "which model (c) is of is in the plot only; tried above with two"
LAB = "measured in the lab, below"
OWN_COST = "a cost of the authors' own program, which is not simulated"


class Left(NamedTuple):
    """Values of one figure that are not compared."""

    figure: str
    values: int
    what: str
    reason: str


NOT_COMPARED: dict[str, tuple[Left, ...]] = {
    "bytescheduler": (
        Left("§2.3", 1, "P3's size of slices", INPUT),
        Left("§4.1", 1, "the time that a message costs its sender", INPUT),
        Left("Abstract", 1, "the greatest gain of all settings", "which setting it is of is not stated"),
        Left("§6.3", 1, "the time to start servers again", OWN_COST),
        Left("Fig. 4", 1, "speed by partition and credit", f"{NO_NUMBER}; {LAB}"),
        Left("Figs. 10 to 13", 4, "samples a second", f"{NO_NUMBER}; what §6.2 states of them is above"),
    ),
    "mg_wfbp": (
        Left("Fig. 4", 6, "a and b of three clusters", INPUT),
        Left("script", 4, "a and b of 2 and 4 GPUs", "within one node, over PCIe"),
        Left("script", 2, "a and b of 16 GPUs", f"{INPUT} (they are those of Fig. 4)"),
        Left("Fig. 9", 8, "computing times", INPUT),
    ),
    "prophet": (
        Left("§2.2, Fig. 4", 2, "which gradients become ready together", f"{INPUT}: steps of twelve"),
        Left("Fig. 3(b)", 1, "rates while ByteScheduler's credit is tuned", "the link's rate is not stated"),
        Left("Fig. 8", 1, "gain over ByteScheduler of five models", LAB),
        Left("Fig. 10", 1, "MB a second", "a tenth of what the speeds of Table 2 need; their ratio is above"),
        Left("Fig. 11", 8, "times that gradients wait and are on their way", f"{LAB}, as ratios"),
        Left("§5.4", 3, "the time of profiling", OWN_COST),
    ),
    "geryon": (
        Left("Fig. 4(b)", 1, "gain by bandwidth", NO_NUMBER),
        Left("Fig. 7", 2, "gain by partition and by slicing", "the model is not stated"),
        Left("Figs. 8, 9", 1, "images a second", f"{NO_NUMBER}; Tables II and III have their ratios"),
        Left("Tables II, IV", 1, "images a second of one GPU", INPUT),
        Left("Fig. 10", 2, "time of scheduling", OWN_COST),
    ),
    "mercury": (
        Left("§II-A", 1, "the time of an iteration without communication", INPUT),
        Left("§III-A", 1, "the time that a message costs its sender", "an upper limit, which 0.3 ms keeps"),
        Left("Fig. 3", 1, "speed by partition and credit", NO_NUMBER),
        Left("Fig. 4", 2, "best partition and credit", "compared as ByteScheduler's, above"),
        Left("Fig. 5(b)", 1, "throughput of ByteScheduler", f"{INPUT} of a row that is tried at Fig. 13"),
        Left("Fig. 6", 1, "best partition and credit", "compared as Fig. 4's"),
        Left("Fig. 7", 1, "granularity of a prototype", OWN_COST),
        Left("Fig. 10", 1, "times of layers", NO_NUMBER),
        Left("Figs. 11, 12", 2, "speed and least bandwidth by model", f"{NO_NUMBER}; simulated above"),
        Left("Fig. 13(c)", 2, "gain of ByteScheduler and BytePS over the default", NO_MODEL),
        Left("Fig. 13", 1, "samples a second", NO_NUMBER),
        Left("Fig. 16", 1, "gain and use of the processor", "the processor is not simulated"),
        Left("Fig. 19(c)", 2, "gain of ByteScheduler and BytePS over the default", NO_MODEL),
        Left("Fig. 21(b)", 1, "samples a second with uneven servers", NO_NUMBER),
        Left("§IV-C", 1, "speed of adding on a server", "a speed of a processor, not of a schedule"),
    ),
}


def section(names: dict[str, str]) -> str:
    """As Markdown.

    Args:
        names: the papers to list, by the name of their module: what to call each.
    """
    lines = ["", "## Not compared", "", "| paper | figure | values | what | why |", "|---|---|---|---|---|"]
    for module, name in names.items():
        lines += [f"| {name} | {each.figure} | {each.values} | {each.what} | {each.reason} |" for each in NOT_COMPARED[module]]
    return "\n".join([*lines, ""])
