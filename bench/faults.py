"""Harm that comes to one rank of three at each moment of a job: do all others name it, and how soon do they end?

    python -m bench.faults                                 every phase, harm, backend and culprit (rank 0 and rank 1)
    python -m bench.faults --phase switch --harm KILL      a part of them
    python -m bench.faults --json

Each cell is one job of three processes on loopback. The table has the seconds from the harm until the last other process had
ended, the most of all culprits. "link" takes the link of an emulated host down (`gradlane lab`); its seconds are until the last
other rank had raised.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gradlane import lab
from tests.live.phases import BACKENDS, HARMS, cut_off, harmed, misnamed
from tests.live.script_server import ScriptServer
from tests.live.scripts.phases import PHASES, STEADY

WITHIN_S = 70.0  # longer than `timeout`, after which every wait is an error
ALL_PHASES = (*tuple(PHASES)[:-2], *STEADY, *tuple(PHASES)[-2:])


def measure(server: ScriptServer, phase: str, culprit: int, harm: str, backend: str, within_s: float) -> dict[str, Any] | None:
    """What became of one job; None if it has no such phase."""
    if harm == "link":
        ends = cut_off(phase, culprit, backend, within_s)
    else:
        with tempfile.TemporaryDirectory() as folder:
            ends = harmed(server, Path(folder), phase, culprit, harm, backend, within_s)
    if ends is None:
        return None
    wrong = misnamed(ends, culprit, harm, phase)
    seconds = max(within_s if end is None else end.after_s for end in ends.values())
    return {"phase": phase, "harm": harm, "backend": backend, "culprit": culprit, "seconds": seconds, "wrong": wrong}


def table(found: list[dict[str, Any]], harms: list[str], backends: list[str]) -> str:
    """By phase and backend, a column for each harm: the most seconds, and how many ended wrongly."""
    lines = ["| phase | backend | " + " | ".join(harms) + " |", "|---|---|" + "---|" * len(harms)]
    for phase in dict.fromkeys(each["phase"] for each in found):
        for backend in backends:
            cells = []
            for harm in harms:
                of = [each for each in found if (each["phase"], each["backend"], each["harm"]) == (phase, backend, harm)]
                wrong = sum(bool(each["wrong"]) for each in of)
                cells.append(f"{max(each['seconds'] for each in of):.1f} s{f', {wrong} wrong' if wrong else ''}" if of else "-")
            if set(cells) != {"-"}:
                lines.append(f"| {phase} | {backend} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", action="append", choices=ALL_PHASES)
    parser.add_argument("--harm", action="append", choices=HARMS)
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--culprit", action="append", type=int, choices=(0, 1, 2))
    parser.add_argument("--times", type=int, default=1, help="jobs for each cell and culprit (1)")
    parser.add_argument("--within", type=float, default=WITHIN_S, help="seconds to wait for the others (70)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="jobs that run at once (1); more make each slower where processors are few"
    )
    parser.add_argument("--json", action="store_true", help="print a list of cases instead of tables")
    options = parser.parse_args()
    harms, backends = list(options.harm or HARMS), list(options.backend or BACKENDS)
    reason = lab.supported()
    if reason is not None and "link" in harms:
        print(f"no links go down here: {reason}", file=sys.stderr)
        harms.remove("link")
    cells = [
        (phase, culprit, harm, backend, options.within)
        for phase in options.phase or ALL_PHASES
        for backend in backends
        for harm in harms
        for culprit in (options.culprit or (0, 1)) * options.times
    ]
    servers = [ScriptServer() for _ in range(options.jobs)]
    free = list(servers)

    def run(cell: tuple[str, int, str, str, float]) -> dict[str, Any] | None:
        server = free.pop()
        try:
            outcome = measure(server, *cell)
        finally:
            free.append(server)
        if outcome is not None:
            phase, culprit, harm, backend, _ = cell
            said = (f"{phase}, {backend}, {harm}, rank {culprit}: {outcome['seconds']:.2f} s", *outcome["wrong"])
            print("\n  ".join(said), file=sys.stderr, flush=True)
        return outcome

    with ThreadPoolExecutor(options.jobs) as pool:
        found = [outcome for outcome in pool.map(run, cells) if outcome is not None]
    for server in servers:
        server.close()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(table(found, harms, backends))
    wrong = sum(bool(each["wrong"]) for each in found)
    print(f"{len(found)} jobs, {wrong} with a rank that did not name the culprit", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
