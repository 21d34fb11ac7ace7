"""The drawings of docs/concepts.md and of the policies' pages: `python -m website.pictures` writes the former.

Each is a simulated run of a small network, so that no drawing shows what the code does not do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gradlane.core.cluster import Cluster
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.core.place import Place
from gradlane.core.plan import Lane, Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.planning import catalog
from gradlane.planning.plans import accepted, make_plan
from gradlane.planning.questions.sweep import Case, judge_plan
from gradlane.policies import P3, ByteScheduler, Ddp, Dear, Geryon, Mercury, TicTac, Wfbp
from gradlane.report.page.drawing import draw, typical_iterations, urgencies
from website.svg import Row, timelines

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MS, MB = 1_000_000, 1_000_000
SHOWN = 2  # iterations

# name, ms of its forward pass, MB of its tensor; backward takes twice as long
_LAYERS = (("conv1", 12, 1), ("conv2", 10, 2), ("conv3", 8, 2), ("fc1", 6, 16), ("fc2", 3, 1))


def small_profile() -> Profile:
    """The network of all drawings: three convolutions and two fully connected layers, 22 MB."""
    tensors, now = [], 0
    for index in range(len(_LAYERS) - 1, -1, -1):
        name, forward, size = _LAYERS[index]
        now += 2 * forward * MS
        tensors.append(TensorProfile(TensorSpec(name, size * MB), now, index))
    layers = tuple(Layer(name, forward * MS, MS // 5 * size) for name, forward, size in _LAYERS)
    return Profile("small", "drawn", tuple(tensors), layers, now, "website/pictures.py")


ALL_REDUCE = Network.line(4, startup_ns=MS, bytes_per_second=200 * MB)
SERVERS = Cluster.homogeneous(2, 2, 200 * MB, colocated=True, startup_ns=MS // 5)


def run(name: str, policy: Policy | Plan, where: Network | Cluster = ALL_REDUCE) -> Row:
    """A row of a drawing: the small network under a policy, or under a plan of it."""
    profile, place = small_profile(), Place.of(where)
    plan = accepted(policy, profile, place) if isinstance(policy, Plan) else make_plan(policy, profile, place)
    outcome = judge_plan(plan, Case(profile, where))
    timeline = outcome.timeline()
    # one more than is shown: what an iteration leaves for the next is drawn too
    drawn = draw(plan, [timeline], typical_iterations([timeline], count=SHOWN + 1))
    layers = tuple(layer.name for layer in profile.layers)
    said = f"{outcome.iteration_ns / MS:.0f} ms a step"
    return Row(name, said, plan, drawn.ranks[0], drawn.iterations[2:], urgencies(plan, profile), layers)


def across(plan: Plan, **changes: Any) -> Plan:
    """The plan with changes, whose order is to be found anew."""
    return msgspec.structs.replace(plan, sequence=None, crosses_barrier=True, **changes)


def _made(policy: Policy, network: Network = ALL_REDUCE) -> Plan:
    return policy.plan(small_profile(), network)


def barrier() -> list[Row]:
    plan = _made(TicTac())
    return [
        run("the next step begins when all updates are done", msgspec.structs.replace(plan, crosses_barrier=False)),
        run("each layer begins when its own update is done", plan),
    ]


def slices() -> list[Row]:
    return [
        run("whole tensors, the most urgent first", TicTac()),
        run("slices of 2 MB, the most urgent first", P3(slice_bytes=2 * MB)),
    ]


def windows() -> list[Row]:
    """On a network on which one message's latency passes while another's bytes do."""
    cost = CostSegment(2 * MS, 200 * MB, latency_ns=2 * MS)
    network = Network(4, (cost,), sharing=Sharing(max_in_flight=8))
    return [
        run(f"a window of {words}", ByteScheduler(partition_bytes=MB, credit_bytes=count * MB), network)
        for words, count in {"one slice": 1, "two slices": 2, "twelve slices": 12}.items()
    ]


def lanes() -> list[Row]:
    two = _made(Geryon(slice_bytes=2 * MB))
    one = tuple(msgspec.structs.replace(message, lane=0) for message in two.messages)
    return [
        run("one lane, first in, first out", across(two, messages=one, lanes=(Lane(),))),
        run("two lanes: the network serves the first before the second", two),
    ]


def packets() -> list[Row]:
    return [
        run("over servers, messages first in, first out", across(_made(Wfbp())), SERVERS),
        run("over servers, the most urgent packet next", Mercury(), SERVERS),
    ]


def two_phases() -> list[Row]:
    return [
        run("DDP's buckets, all-reduced", _ddp()),
        run("reduce-scatter, and all-gather before the forward pass", Dear(fusion_bytes=4 * MB)),
    ]


def _ddp() -> Plan:
    return _made(Ddp(bucket_bytes=6 * MB, first_bucket_bytes=2 * MB))


CONCEPTS: dict[str, tuple[str, Callable[[], Sequence[Row]]]] = {
    "barrier": ("A step that begins when all updates are done, and one that begins layer by layer", barrier),
    "slices": ("A large tensor that blocks urgent ones, and one that is cut into slices", slices),
    "windows": ("Slices under a window of one, two and twelve slices", windows),
    "lanes": ("Slices in one lane, and in two lanes of different network priority", lanes),
    "packets": ("Whole tensors over servers, first in, first out, and packet by packet", packets),
    "two-phases": ("An all-reduce as a reduce-scatter and an all-gather", two_phases),
}


def concept(name: str) -> str:
    """A drawing of docs/concepts.md, as SVG."""
    title, rows = CONCEPTS[name]
    return timelines(title, rows())


def of_policy(name: str) -> str:
    """The small network under a policy of the catalog, beside DDP, as SVG; over servers where only they carry it."""
    policy = catalog.get(name)
    where = ALL_REDUCE if name in catalog.names("all-reduce") else SERVERS
    rows = [run("ddp", _ddp(), where), run(name, policy, where)]
    return timelines(f"The small network under ddp and under {name}", rows)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in CONCEPTS:
        (FOLDER / f"{name}.svg").write_text(concept(name))


if __name__ == "__main__":
    main()
