"""What ranks run with the update on the servers."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.compare.demo import SIDE, Digits
from gradlane.core.launch_options import LaunchOptions
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.errors import GradlaneError, JobError, UnsupportedError
from gradlane.live.comm import long_waits
from gradlane.live.comm.turn import is_here
from gradlane.live.remote_update.served_actions import ServedActions
from gradlane.live.startup.launched import set_launched
from tests.live.cases import differences
from tests.live.loops import LOOPS, Job, Mlp, adam, bits, momentum, under_ddp
from tests.live.models import Convolutions


def compare(rank: int, world: int, name: str, roughly: bool = False, **options: Any) -> list[str]:
    """Run the loop under DDP and under servers that update, in step: what differs of parameters, buffers, the
    optimizer's state and what the loop saw.

    roughly: by more than rounding; so it always is under Adam.
    """
    case = LOOPS[name]
    reference = under_ddp(case, rank)
    torch.manual_seed(7 + rank)
    model = case.model()
    optimizer = case.optimizer(model)
    buffers = {key: value for key, value in case.attach.items() if key == "broadcast_buffers"}
    with (
        warnings.catch_warnings(),
        gradlane.attach_to_servers(model, optimizer, packet_bytes=1024, timeout=20, **buffers, **options) as session,
    ):
        warnings.simplefilter("ignore")
        job = Job(rank, model, model, optimizer, session.no_sync, torch.Generator().manual_seed(1000 + rank), session)
        case.run(job)
    found = {**bits(model, optimizer), **job.seen}
    rounds = roughly or _takes_roots(optimizer)
    return near(reference, found) if rounds else differences(reference, found)


def _takes_roots(optimizer: Any) -> bool:
    """Adam's square roots are rounded as IEEE 754 says, and torch's are not."""
    return any(not isinstance(one, torch.optim.SGD) for one in (optimizer if isinstance(optimizer, list) else [optimizer]))


def near(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs by more than rounding, or that only one side has."""
    return sorted((set(left) ^ set(right)) | {name for name in set(left) & set(right) if not _is_near(left[name], right[name])})


def _is_near(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    return torch.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def _store(name: str) -> Any:
    return dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())


def pace(rank: int, world: int, staleness: int, steps: int) -> list[int]:
    """On rank 0: how many iterations it was ahead when parameters came, each time. Rank 1 begins none of its iterations before
    rank 0 is as far ahead as it may be."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    store = _store(f"pace/{staleness}")
    ahead = []
    with gradlane.attach_to_servers(model, optimizer, staleness=staleness, packet_bytes=1024, timeout=20):
        for step in range(steps):
            if rank == 1:
                store.wait([f"begun/{min(step + staleness, steps - 1)}"], timedelta(seconds=20))
            x, y = model.batch(generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)  # with parameters that came for the step before
            if rank == 0:
                ahead.append(step - store.add("begun by rank 1", 0))
                store.set(f"begun/{step}", "")
            else:
                store.add("begun by rank 1", 1)
            loss.backward()
            optimizer.step()
    return ahead


def one_after_the_other(rank: int, world: int, steps: int) -> tuple[float, float]:
    """Loss on the digits before and after, unbounded: rank 1 begins when rank 0 has done all of its steps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    digits = Digits(rank, world, 32)
    seen = digits.batch()
    store = _store("one after the other")
    before = float(F.cross_entropy(model(seen[0]), seen[1]))
    with gradlane.attach_to_servers(model, optimizer, staleness=None, timeout=20) as session:
        if rank == 1:
            store.wait(["done"], timedelta(seconds=20))
        for _ in range(steps if rank == 0 else 1):
            _step(model, optimizer, digits.batch())
        session.flush()
        store.set("done", "")
        return before, float(F.cross_entropy(model(seen[0]), seen[1]))


def at_their_own_pace(rank: int, world: int, steps: int, staleness: int | None) -> tuple[float, float]:
    """Loss on the digits at the beginning and at the end, where each rank has twice the work of the one before."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    digits = Digits(rank, world, 16 * 2**rank)
    with gradlane.attach_to_servers(model, optimizer, staleness=staleness, packet_bytes=4096, timeout=20):
        losses = [_step(model, optimizer, digits.batch()) for _ in range(steps)]
    return sum(losses[:5]) / 5, sum(losses[-5:]) / 5


def sent(rank: int, world: int, policy: Policy) -> tuple[Plan, list[Any]]:
    """The plan of three steps without a bound, and what was sent when in the last of them."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    with gradlane.attach_to_servers(model, optimizer, policy=policy, staleness=None, packet_bytes=64, timeout=20) as session:
        for _ in range(3):
            _step(model, optimizer, model.batch(generator))
        model.state_dict()  # which waits for the last values
        return session.plan, [span for span in session._values._engine.spans(last=True) if span[0] == "send"]


def resumed(rank: int, world: int, with_adam: bool, **options: Any) -> list[str]:
    """Six steps in one session, beside three, a checkpoint, and three more in another with a fresh model and optimizer: what
    differs at the end."""

    def fresh(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Mlp()
        return model, adam(model) if with_adam else momentum(model)

    batches = [Mlp.batch(torch.Generator().manual_seed(10 * step + rank)) for step in range(6)]
    whole = fresh(1)
    with gradlane.attach_to_servers(*whole, timeout=20, **options):
        for batch in batches:
            _step(*whole, batch)
    first = fresh(1)
    with gradlane.attach_to_servers(*first, timeout=20, **options) as session:
        for batch in batches[:3]:
            _step(*first, batch)
        session.fetch_optimizer_state()
        saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
        _step(*first, batches[0])  # which the checkpoint has no part in
    second = fresh(2 + rank)
    if rank == 0:  # the others need not read it
        second[0].load_state_dict(saved[0])
    second[1].load_state_dict(saved[1])
    with gradlane.attach_to_servers(*second, timeout=20, **options):
        for batch in batches[3:]:
            _step(*second, batch)
    return differences(bits(*whole), bits(*second))


def afterwards(rank: int, world: int, staleness: int | None, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's state when all have closed, where no two ranks made as many steps or at one time."""
    model = Mlp()
    optimizer = adam(model)
    generator = torch.Generator().manual_seed(rank)
    with gradlane.attach_to_servers(model, optimizer, staleness=staleness, timeout=20, **options):
        for _ in range(steps if staleness is not None else steps * (1 + rank)):
            _step(model, optimizer, model.batch(generator))
    return bits(model, optimizer)


def refusal(rank: int, world: int, change: str) -> tuple[str, str]:
    """What is raised when the script does `change`, between backward() and step() in iteration 2, or in a hook in all."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    group, weight = optimizer.param_groups[0], model.layers[1].weight
    changes: dict[str, Callable[[], Any]] = {
        "fetched and changed": lambda: None,
        "learning rate": lambda: group.update(lr=0.2),
        "clipped": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "dropped": lambda: optimizer.zero_grad(),
        "two passes": lambda: F.cross_entropy(model(torch.ones(2, 12)), torch.zeros(2, dtype=torch.long)).backward(),
        "two steps": optimizer.step,
        "added": lambda: add(),
        "state": optimizer.state_dict,
        "load": lambda: optimizer.load_state_dict({}),
        "state by hand": lambda: optimizer.state[weight],
        "copied": lambda: copy.deepcopy(optimizer),
        "fetched too soon": lambda: session.fetch_optimizer_state(),
        "hooked by the class": lambda: torch.optim.Optimizer.register_step_pre_hook(optimizer, drop),
        "data replaced": lambda: setattr(weight.grad, "data", weight.grad * 0.7),
        "written": lambda: weight.detach().zero_(),
    }

    def drop(*_: object) -> None:
        weight.grad = None

    def add() -> None:
        model.added = nn.Linear(2, 3)
        optimizer.add_param_group({"params": list(model.added.parameters())})
        model.added(torch.ones(2)).sum().backward()
        optimizer.step()

    if change == "dropped by a hook":
        model.layers[0].weight.register_post_accumulate_grad_hook(drop)
        changes[change] = drop
    try:
        with gradlane.attach_to_servers(model, optimizer, timeout=20) as session:
            for step in range(5):
                x, y = model.batch(generator)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if step == 2:
                    changes[change]()
                optimizer.step()
                if step == 2 and change == "fetched and changed":
                    session.fetch_optimizer_state()
                    optimizer.state[weight]["momentum_buffer"].mul_(0.5)
    except (UnsupportedError, JobError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def without_its_last_step(rank: int, world: int) -> list[str]:
    """Three steps beside two and a backward pass: what differs at the end."""
    found = []
    for steps in (3, 2):
        torch.manual_seed(1)
        model = Mlp()
        optimizer = momentum(model)
        generator = torch.Generator().manual_seed(rank)
        with gradlane.attach_to_servers(model, optimizer, timeout=20):
            for _ in range(steps):
                _step(model, optimizer, model.batch(generator))
            if steps == 2:
                optimizer.zero_grad()
                x, y = model.batch(generator)
                F.cross_entropy(model(x), y).backward()
        found.append(bits(model, optimizer))
    return differences(*found)


def fetched_by(rank: int, world: int, after: dict[int, int]) -> tuple[list[str], list[str]]:
    """Train six steps. Each rank fetches the optimizer's state once, after the step that `after` has for it, or never.

    Returns:
        What differs at the end from six steps without a fetch, and what differs in the fetched state from that of a job of so
        many steps.
    """

    def trained(steps: int, fetches: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(1)
        model, fetched = Mlp(), {}
        optimizer = momentum(model)
        generator = torch.Generator().manual_seed(rank)
        with gradlane.attach_to_servers(model, optimizer, timeout=20) as session:
            for step in range(steps):
                _step(model, optimizer, model.batch(generator))
                if fetches and step == after.get(rank):
                    session.fetch_optimizer_state()
                    fetched = copy.deepcopy(bits(model, optimizer))
        return bits(model, optimizer), fetched

    at_the_end, fetched = trained(6, fetches=True)
    expected = trained(6, fetches=False)[0]
    so_far = [trained(step + 1, fetches=False)[0] for step in after.values()]
    of_mine = dict(zip(after, so_far, strict=True)).get(rank, {})
    return differences(expected, at_the_end), differences(of_mine, fetched)


def written_before_the_end(rank: int, world: int, staleness: int | None) -> tuple[str, str]:
    """What `close()` raises where a script has written to a parameter after its last step."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    session = gradlane.attach_to_servers(model, optimizer, staleness=staleness, timeout=20)
    try:
        _step(model, optimizer, model.batch(generator))  # without a bound, the other one may have closed
        with torch.no_grad():
            model.layers[1].weight.clamp_(-0.01, 0.01)
        session.close()
    except GradlaneError as error:
        session.close()
        return type(error).__name__, str(error)
    return "nothing", ""


class _WithNothing(Mlp):
    """With a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


def beside_ddp(rank: int, world: int, what: str) -> list[str]:
    """What differs from DDP after six steps of a script with a parameter "without elements", or with an optimizer whose groups
    change after step 2.
    """

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        params = [*model.parameters()]
        groups = [{"params": params[at : at + 2], "lr": 0.1 / (1 + at)} for at in range(0, len(params), 2)]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    changes: dict[str, Callable[[list[dict[str, Any]]], object]] = {
        "without elements": lambda groups: None,
        "another group": lambda groups: groups.__setitem__(0, {**groups[0], "lr": 0.3}),
        "groups in another order": lambda groups: groups.reverse(),
        "a group less": lambda groups: groups.pop(),
        "a parameter elsewhere": lambda groups: groups[2]["params"].append(groups[0]["params"].pop()),
    }
    found = []
    for served in (False, True):
        torch.manual_seed(1)
        model = _WithNothing() if what == "without elements" else Mlp()
        optimizer = optimizer_of(model)
        call = model if served else DistributedDataParallel(model)
        generator = torch.Generator().manual_seed(rank)
        with gradlane.attach_to_servers(model, optimizer, timeout=20) if served else contextlib.nullcontext():
            for step in range(6):
                _step(call, optimizer, model.batch(generator))
                if step == 2:
                    changes[what](optimizer.param_groups)
        found.append({name: value for name, value in bits(model, optimizer).items() if "nothing" not in name})
    return differences(*found)


def refused_number(rank: int, world: int, number: str = "lr", value: float = -0.1) -> tuple[str, str]:
    """What is raised where rank 1 sets a learning rate that no update can have, or another number."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    session = gradlane.attach_to_servers(model, optimizer, timeout=20)
    try:
        for step in range(5):
            if (step, rank) == (3, 1):
                optimizer.param_groups[0][number] = value
            _step(model, optimizer, model.batch(generator))
    except GradlaneError as error:
        return type(error).__name__, str(error)
    finally:
        session.close()
    return "nothing", ""


def closed_later(rank: int, world: int) -> list[str]:
    """What rank 0 says in close(), which rank 1 calls once that was said."""
    model = Mlp()
    store = _store("closed later")
    session = gradlane.attach_to_servers(model, momentum(model), timeout=20)
    said: list[str] = []

    class Tells(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            store.set("said", "")

    tells, log = Tells(), logging.getLogger("gradlane")
    log.addHandler(tells)
    try:
        if rank == 1:
            store.get("said")
        with patch.object(long_waits, "SAY_S", 0.01):
            session.close()
    finally:
        log.removeHandler(tells)
    return said


def too_late(rank: int, world: int) -> str:
    """What rank 0 is told of a value that does not come in time, since rank 1 does not go on before."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    store = _store("too late")
    session = gradlane.attach_to_servers(model, optimizer, timeout=2)
    try:
        for step in range(3):
            if (step, rank) == (2, 1):
                store.get("told")
            _step(model, optimizer, model.batch(generator))
        session.flush()
    except JobError as error:
        store.set("told", "")
        return f"{type(error).__name__}: {error}"
    finally:
        session.close()
    return "nothing"


def with_a_frozen_half(rank: int, world: int) -> bool:
    """Whether parameters that are frozen, and have an optimizer of their own, stay as they are while others train."""
    model = Mlp()
    model.layers[:2].requires_grad_(False)
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (model.layers[:2], model.layers[2:])]
    generator = torch.Generator().manual_seed(rank)
    before = None
    with gradlane.attach_to_servers(model, optimizers, timeout=20):
        for _ in range(3):
            before = before or [param.detach().clone() for param in model.parameters()]  # those of rank 0
            x, y = model.batch(generator)
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)] == [True] * 4 + [False] * 4


def state_after_a_failure(rank: int, world: int) -> list[tuple[str, str]]:
    """What reading the optimizer's state raises once the job has failed, and attaching again; and another state is loaded."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    saved = copy.deepcopy(optimizer.state_dict())
    with contextlib.suppress(JobError, UnsupportedError), gradlane.attach_to_servers(model, optimizer, timeout=20):
        for _ in range(3):
            _step(model, optimizer, model.batch(generator))
        optimizer.step()
    raised = []
    for use in (optimizer.state_dict, lambda: gradlane.attach_to_servers(model, optimizer)):
        try:
            use()
        except JobError as error:
            raised.append((type(error).__name__, str(error)))
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict() == saved
    return raised


def interrupted(rank: int, world: int) -> list[bool]:
    """Whether a handler, which the script has set after attaching, ran in the middle of a change, for each signal that came in
    one.
    """
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    really, seen, heard = ServedActions.copy, [], threading.Event()

    def copied(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        really(*args)

    def handle(*_: Any) -> None:
        seen.append(is_here())
        heard.set()

    try:
        with gradlane.attach_to_servers(model, optimizer, timeout=20), patch.object(ServedActions, "copy", copied):
            signal.signal(signal.SIGUSR2, handle)
            for _ in range(4):
                _step(model, optimizer, model.batch(generator))
            model.state_dict()
            heard.wait(20)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # one may be sent again
    return seen


def stops(rank: int, world: int) -> tuple[str, float]:
    """What rank 0 hears, and how soon, while rank 1 is stopped for 8 s, of a model whose buffers ranks exchange."""
    model = Convolutions()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    set_launched(LaunchOptions(stall_timeout=2.5))
    began = time.monotonic()
    try:
        with gradlane.attach_to_servers(model, optimizer, timeout=60):
            for step in range(10**6):
                if rank == 1 and step == 20:
                    subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
                    os.kill(os.getpid(), signal.SIGSTOP)
                began = time.monotonic()
                _step(model, optimizer, model.batch(generator))
    except JobError as error:
        return type(error).__name__, time.monotonic() - began
    finally:
        set_launched(LaunchOptions())
    return "nothing", 0.0


def leaves_early(rank: int, world: int, staleness: int, buffers: bool) -> tuple[str, str]:
    """What is raised where the last rank makes 5 steps and the others would make 20."""
    model = Convolutions() if buffers else Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    try:
        with gradlane.attach_to_servers(model, optimizer, staleness=staleness, timeout=60):
            for _ in range(5 if rank == world - 1 else 20):
                _step(model, optimizer, model.batch(generator))
    except JobError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def thawed(rank: int, world: int) -> tuple[str, str]:
    """What is raised where a part that was frozen at attach is trained from the third step on."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    model.layers[1].requires_grad_(False)
    try:
        with gradlane.attach_to_servers(model, optimizer, timeout=20):
            for step in range(5):
                model.layers[1].requires_grad_(step >= 2)
                _step(model, optimizer, model.batch(generator))
    except JobError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def attached(rank: int, world: int, how: str) -> tuple[str, str]:
    """What attaching raises."""
    model = Mlp(torch.float64) if how == "float64" else Mlp()
    optimizer: Any = torch.optim.Adam(model.parameters(), amsgrad=how == "amsgrad")
    options: dict[str, Any] = {}
    if how == "RMSprop":
        optimizer = torch.optim.RMSprop(model.parameters())
    elif how == "fused":
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    elif how == "no optimizer":
        optimizer = None
    elif how == "half of it":
        optimizer = torch.optim.Adam(model.layers[:2].parameters())
    elif how == "more than it":
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    elif how == "in two":
        optimizer = [optimizer, torch.optim.Adam(model.layers[:2].parameters())]
    elif how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.1.weight"])
    elif how == "buffers":
        options = {"staleness": None, "broadcast_buffers": True}
    elif how == "order":
        options = {"staleness": 2, "summation_order": "rank"}
    elif how == "negative":
        options = {"staleness": -1}
    elif how == "ranks differ":
        options = {"staleness": rank}
    elif how == "shapes differ":
        model = nn.Linear(4, 3 + rank)
        optimizer = adam(model)
    elif how == "launched policy":
        set_launched(LaunchOptions(policy="prophet"))
    elif how == "policy that merges":
        options = {"policy": "ddp"}
    elif how == "policy with lanes":
        options = {"policy": "geryon"}
    elif how == "policy of several":
        options = {"policy": "auto"}
    elif how == "launched plan":
        set_launched(LaunchOptions(plan="plan.json"))
    elif how == "policies differ":
        options = {"policy": ("mercury", "p3")[rank]}
    elif how == "launched backend":
        set_launched(LaunchOptions(backend="all-reduce"))
    elif how == "launched verify":
        set_launched(LaunchOptions(verify=True))
    elif how == "launched check of gradients":
        set_launched(LaunchOptions(check_finite=True))
    elif how == "launched timeline":
        set_launched(LaunchOptions(timeline="folder", profile="folder"))
    elif how == "launched weight":
        set_launched(LaunchOptions(weight=2))
    elif how == "launched tune":
        set_launched(LaunchOptions(policy="bytescheduler", tune=True))
    elif how == "launched progress":
        set_launched(LaunchOptions(progress=5.0))
    elif how == "launched wire dtype":
        set_launched(LaunchOptions(wire_dtype="bf16"))
    elif how == "launched algorithm":
        set_launched(LaunchOptions(algorithm="flat"))
    try:
        gradlane.attach_to_servers(model, optimizer, timeout=20, **options).close()
    except GradlaneError as error:
        return type(error).__name__, str(error)
    finally:
        set_launched(LaunchOptions())
    return "nothing", ""


def dies(rank: int, world: int) -> tuple[str, str]:
    """What the others hear of when the last rank is gone in the middle of its training."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    try:
        with gradlane.attach_to_servers(model, optimizer, staleness=None, timeout=20):
            for step in range(10**6):
                if rank == world - 1 and step == 20:
                    os._exit(3)
                _step(model, optimizer, model.batch(generator))
    except JobError as error:
        return type(error).__name__, str(error)
    return "nothing", ""
