"""Files that mean harm: what the readers and policies do with them, each in a process of its own.

    python -m bench.hostile [FILES] [SEED]

Reads the worst files of each format that are known (`WORST`), then FILES at random: files of the tests whose values
were made extreme, whose lists were multiplied, which were cut or compressed. A profile that can be read is planned by
every policy. Prints what took the most time of the processor and the most memory. Fails if reading took more than 2 s
of the processor, a plan more than 10 s (a plan may have 100,000 messages, and each takes 50 us), either more than
1 GB, or if anything was raised but one of gradlane's own errors.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gradlane import trace
from gradlane.core import files
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.tuned import Tuned
from gradlane.core.timeline import Timeline
from gradlane.errors import GradlaneError
from gradlane.lab.files import read_spec
from gradlane.planning import catalog
from gradlane.planning.plans import make_plan

MOST_READING_S, MOST_PLANNING_S, MOST_BYTES = 2.0, 10.0, 2**30
MOST_TEXT = 2_000
"""Characters of an error: more than anybody reads."""
MOST_LENGTH = 2**27
"""Characters of a file at random."""

NETWORK = Network.line(4, 50_000, 10**9)
GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
NOUNS: dict[str, Any] = {
    "profile": Profile, "network": Network, "cluster": Cluster, "plan": Plan, "timeline": Timeline, "tuned": Tuned
}  # fmt: skip


def many(part: bytes, times: int) -> bytes:
    return b",".join([part] * times)


def noun(kind: str, body: bytes) -> bytes:
    return b'{"format":"gradlane.%s","version":1,"body":%s}' % (kind.encode(), body)


def profile(tensors: int, size_bytes: int) -> bytes:
    each = b",".join(
        b'{"spec":{"name":"%d","size_bytes":%d},"ready_ns":0,"layer":0}' % (index, size_bytes) for index in range(tensors)
    )
    layers = b'[{"name":"l","forward_ns":1}]'
    return noun("profile", b'{"model":"m","device":"d","tensors":[%s],"layers":%s,"backward_ns":1}' % (each, layers))


def timeline(spans: int) -> bytes:
    return noun("timeline", b'{"plan":"x","rank":0,"spans":[%s]}' % many(b'["send",0,0,0,0]', spans))


def cluster(hosts: int) -> bytes:
    return noun("cluster", b'{"hosts":[%s],"workers":[{"host":0}],"servers":[{"host":0}]}' % many(b"{}", hosts))


def plan(slices: int) -> bytes:
    messages = b'[{"slices":[%s]}]' % many(b"[0,0,4]", slices)
    return noun("plan", b'{"policy":"p","model":"m","tensors":[],"messages":%s}' % messages)


def kineto(*events: bytes) -> bytes:
    return b'{"traceEvents":[' + b",".join(events) + b"]}"


def gradient(shape: bytes) -> bytes:
    """An event of a profiler's trace."""
    return b'{"ph":"X","name":"torch::autograd::AccumulateGrad","dur":1,"args":{"Input Dims":[[%s]]}}' % shape


def chakra(shape: bytes) -> bytes:
    values = b'[[0,0,0,1,4,"cpu"]]'
    inputs = b'{"values":%s,"shapes":[[%s]],"types":["Tensor(float)"]}' % (values, shape)
    node = b'{"id":1,"name":"torch::autograd::AccumulateGrad","inputs":%s}' % inputs
    return b'{"schema":"1.1.0-chakra.0.0.4","nodes":[%s]}' % node


_SECOND_NODE = b"node1 -- a" + b" -- forward_compute_time=1, backward_compute_time=1, activation_size=1" * 140
WORST: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a tensor of 2^50 bytes": ("profile", lambda: profile(1, 2**50)),
    "a hundred thousand tensors": ("profile", lambda: profile(100_000, 4)),
    "a hundred thousand tensors of 2^40 bytes": ("profile", lambda: profile(100_000, 2**40)),
    "more tensors than there may be": ("profile", lambda: profile(600_000, 4)),
    "four million spans": ("timeline", lambda: timeline(3_900_000)),
    "a million spans": ("timeline", lambda: timeline(990_000)),
    "a million hosts": ("cluster", lambda: cluster(990_000)),
    "a message of a million slices": ("plan", lambda: plan(990_000)),
    "lists in lists": ("plan", lambda: noun("plan", b"[" * 900_000)),
    "empty events, compressed": ("trace", lambda: gzip.compress(kineto(*[b"{}"] * 60_000_000), 1)),
    "as many empty events as there may be": ("trace", lambda: kineto(*[b"{}"] * 1_190_000)),
    "events of one name that is long": ("trace", lambda: kineto(b'{"name":"%s"}' % (b"a" * 190_000_000))),
    "gradients of long shapes": ("trace", lambda: kineto(*[gradient(many(b"1", 900_000))] * 40)),
    "a shape of a million lengths": ("trace", lambda: chakra(b",".join([b"9"] * 1_000_000))),
    "a shape of long numbers": ("trace", lambda: chakra(b",".join([b'"' + b"9" * 4000 + b'"'] * 2))),
    "a list of lists in a shape": ("trace", lambda: chakra(b"[" * 1_000_000)),
    "empty lines": ("trace", lambda: b"node1 -- a -- forward_compute_time=" + b"\n" * 190_000_000),
    "lines that nearly are nodes": ("trace", lambda: b"\n".join([_SECOND_NODE[:9_900]] * 500)),
    "a lab of long lists": ("lab", lambda: b'{"hosts":[' + b"[]," * 300_000),
}  # fmt: skip


class Outcome(NamedTuple):
    what: str
    said: str
    seconds: float
    peak_bytes: int
    most_s: float

    @property
    def fault(self) -> str:
        """What is wrong with it, or ""."""
        if not self.said.startswith(("taken", "refused")):
            return f"raised {self.said:.200}"
        if self.seconds > self.most_s:
            return f"took {self.seconds:.1f} s"
        return f"took {self.peak_bytes / 2**20:.0f} MiB" if self.peak_bytes > MOST_BYTES else ""


def apart(what: str, deed: Callable[[], object], most_s: float = MOST_READING_S) -> Outcome:
    """What `deed` came to in a process of its own, with its processor time and peak memory.

    What this process has loaded counts: some tens of MiB.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
        resource.setrlimit(resource.RLIMIT_AS, (4 * MOST_BYTES, 4 * MOST_BYTES))
        try:
            deed()
            said = "taken"
        except GradlaneError as error:
            said = f"refused: {type(error).__name__}: {error}"
            if len(said) > MOST_TEXT:
                said = f"an error of {len(said)} characters"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode(errors="replace")[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status, used = os.wait4(child, 0)
    return Outcome(what, said or f"ended by wait status {status}", used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, most_s)


def outcomes(what: str, kind: str, path: Path) -> Iterator[Outcome]:
    """Of reading a file; and of planning what it says, if it is a profile."""
    if kind == "trace":
        compute_ns = 10**9 if b"chakra" in path.read_bytes()[:200] else None
        yield apart(what, lambda: trace.read(path, compute_ns=compute_ns))
        return
    if kind == "lab":
        yield apart(what, lambda: read_spec(path))
        return
    read = apart(what, lambda: files.read(path, NOUNS[kind]))
    yield read
    if read.said != "taken" or kind != "profile":
        return
    found = files.read(path, Profile)
    for place in (Place(NETWORK, "all-reduce"), Place(NETWORK, "server")):
        for name in catalog.names(place.backend):
            if name != "searched":  # which takes the time that it is given
                planning = partial(make_plan, catalog.get(name), found, place)
                yield apart(f"{what}, {name} over {place.backend}", planning, MOST_PLANNING_S)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            found.append((node, key))
            if isinstance(node[key], (dict, list)):
                waiting.append(node[key])
    return found


def _length(tree: Any, known: dict[int, int]) -> int:
    """About how many characters `tree` has as JSON; what is in it many times is looked at once."""
    if id(tree) not in known:
        if isinstance(tree, dict):
            known[id(tree)] = sum(len(key) + 4 + _length(part, known) for key, part in tree.items()) + 2
        elif isinstance(tree, list):
            known[id(tree)] = sum(_length(part, known) + 1 for part in tree) + 2
        else:
            known[id(tree)] = len(repr(tree))
    return known[id(tree)]


EXTREME = [0, -1, 1, 2**31, 2**50, 2**63, 10**18, 10**400, 1e308, 0.1, "", "x" * 100_000, None, True, [], {}, [[]] * 1000]


def anything(draw: random.Random) -> tuple[str, bytes]:
    """A file: its kind and its bytes."""
    kind = draw.choice([*NOUNS, "trace", "trace", "trace", "profile", "lab"])
    times = int(10 ** draw.uniform(0, 5.5))
    if kind == "trace":
        event = json.dumps(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": draw.choice(["torch::autograd::AccumulateGrad", "ProfilerStep#1", "Optimizer.step", "aten::add"]),
                "ts": draw.choice([0, 1, 5.5, 1e300]),
                "dur": draw.choice([0, 1, 1e18, -1]),
                "tid": 1,
                "args": {
                    "Input Dims": [[draw.choice([1, 2**50, -1])] * draw.choice([0, 1, 70, 4000])],
                    "Input type": ["float"],
                    "Sequence number": draw.randint(-1, 3),
                },
            }
        ).encode()
        data = draw.choice(
            [
                lambda: kineto(*[event] * min(times, 20_000, MOST_LENGTH // len(event))),
                lambda: chakra(b",".join([b"%d" % draw.choice([1, 2, 2**40])] * times)),
                lambda: (
                    b"node1 -- Conv -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=4\n"
                    + b"".join(
                        b"\tnode%d -- node%d\n" % (draw.randint(1, 3), draw.randint(1, 3)) for _ in range(min(times, 5_000))
                    )
                ),
                lambda: b"".join(
                    b"[%d, %d, 10.0, 1.0]\n" % (index, draw.randint(0, 2**50)) for index in range(min(times, 20_000))
                ),
                lambda: _SECOND_NODE[: min(times, 9_999)] * 10,
            ]
        )()
    elif kind == "lab":
        data = json.dumps(
            {"hosts": draw.choice(EXTREME), "link": draw.choice(EXTREME), "changes": [draw.choice(EXTREME)] * min(times, 1000)}
        ).encode()
    else:
        tree = json.loads((GOLDEN / f"{kind}.json").read_bytes())
        for _ in range(draw.randint(1, 3)):
            node, key = draw.choice(_places(tree))
            before, how = node[key], draw.randint(0, 2)
            if how == 0 or not isinstance(node[key], list) or not node[key]:
                if isinstance(node[key], int) and draw.randint(0, 2):
                    node[key] = draw.choice([each for each in EXTREME if type(each) is int])
                else:
                    node[key] = copy.deepcopy(draw.choice(EXTREME))  # which is changed itself, perhaps
            else:
                node[key] = before * min(times, 30_000 // len(before) + 1)
            if _length(tree, {}) > MOST_LENGTH:  # what was changed is in lists that are in lists
                node[key] = before
        if kind == "profile" and draw.randint(0, 1):
            body = tree.get("body")
            tensors = body.get("tensors") if isinstance(body, dict) else None
            for index, each in enumerate(tensors if isinstance(tensors, list) else []):
                if isinstance(each, dict) and isinstance(each.get("spec"), dict):
                    each["spec"]["name"] = str(index)
        data = json.dumps(tree).encode()
    if draw.randint(0, 9) == 0:
        data = data[: draw.randint(0, len(data))]
    return kind, gzip.compress(data, 1) if kind == "trace" and draw.randint(0, 3) == 0 else data


def show(outcome: Outcome) -> str:
    return f"{outcome.seconds:5.2f} s {outcome.peak_bytes / 2**20:5.0f} MiB  {outcome.what}: {outcome.said:.100}"


def main(count: int = 1_000, seed: int = 1) -> int:
    draw = random.Random(seed)
    seen: list[Outcome] = []
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, (what, kind, make) in enumerate(
            [
                *((what, kind, make) for what, (kind, make) in WORST.items()),
                *((f"file {number} of seed {seed}", "", lambda: b"") for number in range(count)),
            ]
        ):
            kind, data = (kind, make()) if kind else anything(draw)
            path = Path(folder, "file.yaml" if number % 2 and kind == "lab" else "file")
            path.write_bytes(data)
            size = len(data)
            del data  # what this process holds counts in those that it starts
            for outcome in outcomes(f"{what} ({kind}, {size} bytes)", kind, path):
                seen.append(outcome)
                verdicts[outcome.said.partition(":")[0]] += 1
                if outcome.fault:
                    print(f"FAULT {outcome.what}: {outcome.fault}", flush=True)
            path.unlink()
            if number % 1_000 == 0:
                print(f"{number} files", file=sys.stderr, flush=True)
    print(f"{len(WORST)} files of the worst and {count} at random: {len(seen)} readings and plans; {dict(verdicts)}")
    for title, key in (("most time", lambda each: each.seconds), ("most memory", lambda each: each.peak_bytes)):
        print(f"{title}:", *(f"  {show(each)}" for each in sorted(seen, key=key, reverse=True)[:6]), sep="\n")
    return 1 if any(each.fault for each in seen) else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
