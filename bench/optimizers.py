"""Optimizers of public libraries beside DDP: `python -m bench.optimizers [NAME...]`.

The optimizers are those of torch, and of pytorch-optimizer, schedulefree, lion-pytorch and prodigyopt where they are installed.
Each trains a small network on two ranks three times: under DDP, attached as it is, and attached with `cross_barrier=True`. With
the last a script vouches for its optimizer. Sums come late, so that the session defers all updates that it may defer. A row
says whether parameters and state equal DDP's bit for bit, and how many updates were deferred, or what the session refused.
Exits with 1 if bits differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.errors import GradlaneError
from tests.live.cases import bits_of, differences
from tests.live.loops.job import GIVEN, POLICIES, Mlp
from tests.live.networks import counting_deferred_updates, slow_network
from tests.live.ranks import Ranks

STEPS = 9
LIBRARIES = ("torch.optim", "pytorch_optimizer", "schedulefree", "lion_pytorch", "prodigyopt")
ARMS: dict[str, dict[str, Any]] = {"as it is": {}, "vouched for": {"cross_barrier": True}}


def found() -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    """The optimizers of those libraries that are installed, by name."""
    for library in LIBRARIES:
        try:
            module = importlib.import_module(library)
        except ImportError:
            continue
        for name, value in sorted(vars(module).items()):
            if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and not inspect.isabstract(value):
                yield f"{library}.{name}", value


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.optimizers", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="optimizers whose names contain one of these; default: all")
    given = parser.parse_args()
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed", file=sys.stderr)
    counts = {arm: Counter[str]() for arm in ARMS}
    ranks = Ranks(2)
    for name in [name for name, _ in found() if not given.names or any(each in name for each in given.names)]:
        outcomes = ranks.try_run("bench.optimizers:compare", name=name)
        if not all(ok for ok, _ in outcomes):
            print(f"{name}: {outcomes[0][1]}")
        elif "refused" in (compared := outcomes[0][1]):
            print(f"{name}: DDP itself: {compared['refused']}")
            continue
        else:
            for arm, (kind, text) in compared.items():
                counts[arm][kind] += 1
                print(f"{name}, {arm}: {kind}{text and f', {text}'}", flush=True)
            if all(kind in ("equal", "equal, deferred") for kind, _ in compared.values()):
                continue
        ranks.renew()  # a sum may be half done
    ranks.close()
    for arm, kinds in counts.items():
        print(f"{arm}: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")
    return int(any(kinds["differs"] for kinds in counts.values()))


def compare(rank: int, world: int, name: str) -> dict[str, Any]:
    """What became of each arm: its kind, and more about it; or "refused", by DDP or the optimizer itself."""
    warnings.simplefilter("ignore")
    kind = dict(found())[name]
    try:
        reference = _trained(rank, world, kind, None)
    except Exception as error:  # it wants other arguments, or a closure
        return {"refused": f"{type(error).__name__}: {error}".partition("\n")[0]}
    outcomes = {}
    for arm, options in ARMS.items():
        with slow_network(), counting_deferred_updates() as deferred:
            try:
                differing = differences(reference, _trained(rank, world, kind, options))
            except GradlaneError as error:
                outcomes[arm] = ("refused", str(error).rpartition(": ")[2])
                break
            except Exception as error:
                outcomes[arm] = ("raises", f"{type(error).__name__}: {error}".partition("\n")[0])
                break
        if differing:
            unsteady = differences(reference, _trained(rank, world, kind, None))
            outcomes[arm] = ("two runs of DDP differ", "") if unsteady else ("differs", ", ".join(differing[:3]))
            break
        count = sum(deferred)
        outcomes[arm] = ("equal, deferred", f"{count} updates") if count else ("equal", "")
    return outcomes


def _trained(rank: int, world: int, kind: Any, options: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Mlp()
    try:
        optimizer = kind(model.parameters(), lr=1e-3)
    except TypeError:
        optimizer = kind(model.parameters())
    getattr(optimizer, "train", bool)()  # schedule-free ones have two modes
    generator = torch.Generator().manual_seed(rank)
    with contextlib.ExitStack() as stack:
        call: Any = model
        if options is None:
            call = DistributedDataParallel(model)
        else:
            policy = gradlane.policies.get("bytescheduler", **POLICIES["bytescheduler"])
            network = gradlane.Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second)
            fixed: dict[str, Any] = {"network": network, "profile_iterations": 1, "timeout": 20, "backend": "all-reduce"}
            session: Any = stack.enter_context(gradlane.attach(model, optimizer, policy, **fixed, **options))
        for step in range(STEPS):
            x, y = Mlp.batch(generator)
            optimizer.zero_grad()
            torch.manual_seed(100 + step)  # some draw random numbers
            F.cross_entropy(call(x), y).backward()
            optimizer.step()
        if options is not None:
            session.flush()
    return bits_of(model, optimizer)


if __name__ == "__main__":
    sys.exit(main())
