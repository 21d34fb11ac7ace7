"""Torch's own tests of torch.distributed, run over Gloo and over "gradlane".

    python -m tests.torch_suite [--only REGEX] [--world 3] [--json]

The tests are those of the installed wheel (`torch.testing._internal.distributed.distributed_test`): its source is read,
"gloo" is exchanged for "gradlane", and every test runs on `world` processes. The processes are forks of one that has
imported torch already: a test then takes a second and not five. `make test-c10d` runs all of them and prints what differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"
BACKENDS = ("gloo", "gradlane")
WORLD = 3  # torch's subgroups are of ranks 1 and 2
TIMEOUT_S = 60  # of a test

# The one line that is about Gloo's own settings, which gradlane does not have.
_KEPT = '"backend_name") == "gloo"'


@dataclass(frozen=True)
class Result:
    """How one test ended.

    Attributes:
        test: its name.
        end: "pass", "skip" or "fail".
        reason: of a skip, or the last line of a failure.
        seconds: that it took.
    """

    test: str
    end: str
    reason: str
    seconds: float


def exchanged(source: str, backend: str) -> str:
    """`source` of torch's tests with the name of the backend in place of Gloo's.

    torch's `monitored_barrier` refuses every other name, so that gradlane's stands for it.
    """
    if backend == "gloo":
        return source
    lines = []
    for line in source.splitlines(keepends=True):
        if _KEPT not in line:
            line = line.replace('"gloo"', f'"{backend}"').replace("Backend.GLOO", f"Backend.{backend.upper()}")
            line = line.replace("dist.monitored_barrier", "gradlane.live.c10d.monitored_barrier")
        lines.append(line)
    return "".join(lines)


def load(backend: str, world: int) -> types.ModuleType:
    """Torch's module of tests for `backend` and `world` ranks; once in a process, since it reads the environment."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(world), DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TIMEOUT_S))
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    import torch
    from torch.testing._internal import common_distributed

    if backend == "gradlane":
        import gradlane.live.c10d

    logging.disable(logging.INFO)  # torch tells of every process that it starts
    torch.set_num_threads(1)
    for feature in ("ddp", "gpu", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add(backend)
    found = importlib.util.find_spec(SUITE)
    assert found is not None
    assert found.origin is not None
    module = types.ModuleType("torch_distributed_tests")
    module.__file__ = found.origin
    sys.modules[module.__name__] = module
    if backend == "gradlane":
        module.__dict__["gradlane"] = gradlane
    source = exchanged(Path(found.origin).read_text(), backend)
    exec(compile(source, found.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def _case(module: types.ModuleType) -> type[unittest.TestCase]:
    class Forked(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            import torch.multiprocessing

            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            null = os.open(os.devnull, os.O_WRONLY)  # what a rank prints is about failures that the test provokes
            os.dup2(null, 1)
            os.dup2(null, 2)
            super()._run(*args, **kwargs)

    return Forked


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Died|Failed|Stalled)\b.*:", line)]
    return (said or lines or [""])[-1][:300]


def run(backend: str, world: int, only: str, told: Any = None) -> list[Result]:
    """Run torch's tests whose names match the regular expression `only`.

    Args:
        backend: "gloo" or "gradlane".
        world: number of ranks.
        only: searched for in a test's name.
        told: called with each result.
    """
    case = _case(load(backend, world))
    results = []
    for name in unittest.TestLoader().getTestCaseNames(case):
        if not re.search(only, name):
            continue
        outcome = unittest.TestResult()
        began = time.monotonic()
        with contextlib.redirect_stdout(sys.stderr):  # torch prints which process failed
            case(name).run(outcome)
        seconds = time.monotonic() - began
        if outcome.skipped:
            result = Result(name, "skip", outcome.skipped[0][1], seconds)
        elif outcome.wasSuccessful():
            result = Result(name, "pass", "", seconds)
        else:
            result = Result(name, "fail", _last_line((outcome.failures + outcome.errors)[0][1]), seconds)
        results.append(result)
        if told is not None:
            told(result)
    return results


def both(world: int, only: str) -> dict[str, dict[str, Result]]:
    """The results by backend and test, each backend in a process of its own."""
    ends = {}
    for backend in BACKENDS:
        command = [
            sys.executable,
            "-m",
            "tests.torch_suite",
            "--backend",
            backend,
            "--world",
            str(world),
            "--only",
            only,
            "--json",
        ]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        ends[backend] = {each["test"]: Result(**each) for each in map(json.loads, output.splitlines())}
    return ends


def table(ends: dict[str, dict[str, Result]]) -> str:
    """What differs between the backends and what neither passes, then how many of each."""
    gloo, ours = (ends[backend] for backend in BACKENDS)
    lines = [f"{'test':70s} {'gloo':5s} gradlane"]
    for test in gloo:
        pair = gloo[test].end, ours[test].end
        if pair != ("pass", "pass") and pair != ("skip", "skip"):
            lines.append(f"{test:70s} {pair[0]:5s} {pair[1]:5s} {ours[test].reason or gloo[test].reason}")
    lines.append("")
    lines.append("skipped over both:")
    reasons = Counter(ours[test].reason for test in gloo if (gloo[test].end, ours[test].end) == ("skip", "skip"))
    lines += [f"{count:5d}  {reason}" for reason, count in reasons.most_common()]
    lines.append("")
    for backend in BACKENDS:
        counts = Counter(result.end for result in ends[backend].values())
        seconds = sum(result.seconds for result in ends[backend].values())
        lines.append(
            f"{backend:9s} {counts['pass']:4d} pass {counts['skip']:4d} skip {counts['fail']:4d} fail  {seconds:.0f} s"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, help="this one alone, a line a test")
    parser.add_argument("--world", type=int, default=WORLD, help="number of ranks")
    parser.add_argument("--only", default="", help="regular expression of the tests' names")
    parser.add_argument("--json", action="store_true", help="print results as JSON, one object a line")
    args = parser.parse_args()
    if args.backend:
        if args.json:
            run(args.backend, args.world, args.only, lambda result: print(json.dumps(asdict(result)), flush=True))
        else:
            run(
                args.backend,
                args.world,
                args.only,
                lambda result: print(f"{result.end:5s} {result.seconds:6.1f} s  {result.test}  {result.reason}", flush=True),
            )
        return
    ends = both(args.world, args.only)
    if args.json:
        print(json.dumps({backend: [asdict(each) for each in ends[backend].values()] for backend in BACKENDS}))
    else:
        print(table(ends))
    failed = [t for t, result in ends["gloo"].items() if result.end == "pass" and ends["gradlane"][t].end != "pass"]
    if failed:
        raise SystemExit(f"{len(failed)} tests pass over gloo and not over gradlane")


if __name__ == "__main__":
    main()
