"""Training loops as people write them. Each runs on real ranks under DDP and under gradlane; `compare` says what differs.

A loop gets a `Job` and must not know which of the two it runs under. What it puts into `job.seen` is compared as well.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradlane
from gradlane.core.network import Network
from gradlane.errors import JobError, UnsupportedError
from tests.live.cases import bits_of, differences
from tests.live.models import Convolutions, TiedTransformer
from tests.live.networks import counting_deferred_updates, slow_network

STEPS = 7  # iteration 0 counts, 1 is measured, and from 2 on the policy's plan is in force
GIVEN = Network.line(2, startup_ns=20_000, bytes_per_second=10**9)
POLICIES = {
    "bytescheduler": {"partition_bytes": 2000, "credit_bytes": 8000},
    "p3": {"slice_bytes": 4000},
    "blocks": {"least_bytes": 4000, "most_bytes": 8000},
}


class Mlp(nn.Module):
    """Four layers, 30 KB: as many messages as there is time for in a test."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = [(12, 40), (40, 60), (60, 60), (60, 6)]
        self.layers = nn.ModuleList(nn.Linear(*size, dtype=dtype) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 12, generator=generator), torch.randint(6, (8,), generator=generator)


@dataclass
class Job:
    """What a loop trains. `call` is the model as the loop calls it: DDP's wrapper, or the model itself."""

    rank: int
    model: Any
    call: Any
    optimizer: Any
    no_sync: Callable[[], contextlib.AbstractContextManager[None]]
    generator: torch.Generator
    session: gradlane.live.Session | None
    seen: dict[str, torch.Tensor] = field(default_factory=dict)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.batch(self.generator)

    def loss(self, call: Any = None) -> torch.Tensor:
        x, y = self.batch()
        return F.cross_entropy((call or self.call)(x), y)

    def see(self, name: str, value: Any) -> None:
        """`value` (a number, a tensor, or a dict of tensors) must be the same under DDP."""
        if isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, torch.Tensor):
                    self.see(f"{name}.{key}", item)
        else:
            self.seen[f"{len(self.seen)}:{name}"] = torch.as_tensor(value).detach().clone()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


@dataclass(frozen=True)
class Loop:
    """How a loop is to be run, and what is to be expected besides equality.

    defers: whether updates are deferred when sums come late (None: on some ranks in some steps). says: the one line
    that rank 0 logs, or none.
    """

    run: Callable[[Job], None]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Any]
    ddp: dict[str, Any]
    attach: dict[str, Any]
    defers: bool | None
    says: str


LOOPS: dict[str, Loop] = {}


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loop(
    model: Callable[[], nn.Module] = Mlp,
    optimizer: Callable[[nn.Module], Any] = momentum,
    ddp: dict[str, Any] | None = None,
    attach: dict[str, Any] | None = None,
    defers: bool | None = True,
    says: str = "",
) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    def register(run: Callable[[Job], None]) -> Callable[[Job], None]:
        LOOPS[run.__name__] = Loop(run, model, optimizer, ddp or {}, attach or {}, defers, says)
        return run

    return register


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """The warnings that gradlane logs meanwhile."""
    handler, logger = _Lines(), logging.getLogger("gradlane")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def compare(rank: int, world: int, name: str) -> dict[str, Any]:
    """Run the loop under DDP, then under gradlane on a slow network and on a fast one."""
    case = LOOPS[name]
    reference = under_ddp(case, rank)
    outcome: dict[str, Any] = {}
    for policy, network in (("bytescheduler", slow_network), ("p3", contextlib.nullcontext), ("blocks", slow_network)):
        with network(), counting_deferred_updates() as deferred, log_lines() as lines:
            bits = _under_gradlane(case, rank, world, gradlane.policies.get(policy, **POLICIES[policy]))
        outcome[policy] = {"differs": differences(reference, bits), "deferred": sum(deferred), "lines": lines}
    return outcome


def compare_over_servers(rank: int, world: int, name: str) -> dict[str, list[str]]:
    """Run the loop under DDP, then over servers, where the network is slow and where it is fast."""
    case = LOOPS[name]
    reference = under_ddp(case, rank)
    found = {}
    for policy, network in (("bytescheduler", slow_network), ("mercury", contextlib.nullcontext)):
        chosen = gradlane.policies.get(policy, **POLICIES.get(policy, {}))
        with network():
            found[policy] = differences(reference, _under_gradlane(case, rank, world, chosen, backend="server"))
    return found


def under_ddp(case: Loop, rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = case.model()
    optimizer = case.optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = DistributedDataParallel(model, **case.ddp)
        job = Job(rank, model, call, optimizer, call.no_sync, torch.Generator().manual_seed(1000 + rank), None)
        case.run(job)
    return {**bits(model, optimizer), **job.seen}


def _under_gradlane(case: Loop, rank: int, world: int, policy: Any, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7 + rank)  # attach must make ranks equal to rank 0
    model = case.model()
    optimizer = case.optimizer(model)
    with (
        warnings.catch_warnings(),
        gradlane.attach(
            model,
            optimizer if isinstance(optimizer, (torch.optim.Optimizer, list)) else None,
            policy,
            network=Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second),
            profile_iterations=1,
            timeout=20,
            **case.attach,
            **options,
        ) as session,
    ):
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(1000 + rank)
        job = Job(rank, model, model, optimizer, session.no_sync, generator, session)
        case.run(job)
        session.flush()
        assert session.settled
        return {**bits(model, optimizer), **job.seen}


def bits(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, by optimizer, and every state tensor; where there is no optimizer, the parameters."""
    found = {}
    for index, one in enumerate(optimizer if isinstance(optimizer, list) else [optimizer]):
        if isinstance(one, torch.optim.Optimizer):
            found.update({f"{index}/{name}": value for name, value in bits_of(model, one).items()})
    return found or {name: value.detach().clone() for name, value in model.named_parameters()}


# -- hyper-parameters that change ----------------------------------------------------------------------------


@loop()
def step_lr(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=2, gamma=0.3)
    for _ in range(STEPS):
        job.step()
        scheduler.step()


@loop(optimizer=adam)
def one_cycle_lr_changes_momentum_too(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.05, total_steps=STEPS)
    for _ in range(STEPS):
        job.step()
        scheduler.step()


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    last = list(model.layers[-1].parameters())
    rest = list(model.layers[:-1].parameters())
    return torch.optim.AdamW([{"params": rest, "lr": 0.01}, {"params": last, "lr": 0.05, "weight_decay": 0.1}])


@loop(optimizer=_two_groups)
def parameter_groups_with_rates_of_their_own(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        job.optimizer.param_groups[1]["lr"] = 0.05 / (step + 1)


@loop(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02), foreach=False))
def a_rate_that_is_a_tensor_changed_in_place(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        job.optimizer.param_groups[0]["lr"].mul_(0.7)


def _two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model.layers[:2].parameters(), lr=0.1, momentum=0.5),
        torch.optim.Adam(model.layers[2:].parameters(), lr=0.01),
    ]


@loop(optimizer=_two_optimizers)
def two_optimizers(job: Job) -> None:
    for _ in range(STEPS):
        for optimizer in job.optimizer:
            optimizer.zero_grad()
        job.loss().backward()
        for optimizer in job.optimizer:
            optimizer.step()


# -- gradients: accumulated, kept, clipped, scaled, read ------------------------------------------------------------


@loop()
def accumulation_with_no_sync(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.loss().backward()
            job.loss().backward()
        job.loss().backward()
        job.optimizer.step()


@loop()
def accumulation_that_sums_each_pass(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        for _ in range(3):  # so that the plan is taken up in the middle of a step
            job.loss().backward()
        job.optimizer.step()


@loop()
def gradients_never_zeroed(job: Job) -> None:
    for _ in range(STEPS):
        job.loss().backward()
        job.optimizer.step()


@loop()
def zero_grad_in_place(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad(set_to_none=False)
        job.loss().backward()
        job.optimizer.step()


@loop()
def zero_grad_after_the_step(job: Job) -> None:
    for step in range(STEPS):
        job.loss().backward()
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=step % 2 == 0)


@loop()
def zero_grad_between_forward_and_backward(job: Job) -> None:
    for step in range(STEPS):
        loss = job.loss()
        job.model.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        job.optimizer.step()


READ = "gradients are read between backward and step"


@loop(defers=False, says=READ)
def clip_grad_norm(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        job.see("norm", nn.utils.clip_grad_norm_(job.model.parameters(), 0.1))
        job.optimizer.step()


@loop(defers=False, says=READ)
def clip_grad_value(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        nn.utils.clip_grad_value_(job.model.parameters(), 0.01)
        job.optimizer.step()


@loop(defers=False, says=READ)
def grad_scaler_with_a_step_of_infinities(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(STEPS):
        job.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = job.loss()
        if step == 4 and job.rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.see("scale", scaler.get_scale())


@loop(defers=False, says=READ)
def grad_scaler_with_clipping(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        scaler.scale(job.loss()).backward()
        scaler.unscale_(job.optimizer)
        job.see("norm", nn.utils.clip_grad_norm_(job.model.parameters(), 0.1))
        scaler.step(job.optimizer)
        scaler.update()


@loop()
def bfloat16_autocast(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = job.loss()
        loss.backward()
        job.optimizer.step()


@loop(defers=False, says=READ)
def gradients_logged_before_the_step(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        for name, param in job.model.named_parameters():
            job.see(f"norm of {name}", param.grad.norm().item())
            job.see(f"{name} as numpy", param.grad.numpy().copy())
            job.see(f"{name} as a list", param.grad.tolist())
            job.see(f"{name} detached", param.grad.detach().abs().max())
            job.see(f"copy of {name}", copy.deepcopy(param.grad))
            assert f"{param.grad}".startswith("tensor(")
        job.optimizer.step()


@loop()
def one_gradient_logged_after_the_step(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        job.optimizer.step()
        job.see("gradient", job.model.layers[0].weight.grad.sum())
        job.see("parameter", job.model.layers[0].weight.detach().numpy().copy())


@loop(defers=False, says=READ)
def gradients_replaced_before_the_step(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        for param in job.model.parameters():
            param.grad = param.grad * 0.5
        job.optimizer.step()


@loop()
def hooks_on_gradients(job: Job) -> None:
    for param in job.model.parameters():
        param.register_hook(lambda gradient: gradient * 1.5)
    for _ in range(STEPS):
        job.step()


def _by_hand(model: nn.Module) -> None:
    return None


@loop(optimizer=_by_hand, defers=False)
def updates_by_hand_without_an_optimizer(job: Job) -> None:
    for _ in range(STEPS):
        for param in job.model.parameters():
            param.grad = None
        job.loss().backward()
        with torch.no_grad():
            for param in job.model.parameters():
                param.add_(param.grad, alpha=-0.1)


# -- parameters read, copied, replaced in mid-flight ---------------------------------------------------------------


@loop(optimizer=adam)
def state_dicts_in_mid_flight(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step % 2 == 0:
            job.see("model", job.model.state_dict())
            for index, state in job.optimizer.state_dict()["state"].items():
                job.see(f"optimizer {index}", state)
        elif step % 3 == 0:
            for index, state in job.optimizer.state_dict()["state"].items():
                job.see(f"optimizer {index}", state)


@loop(optimizer=adam)
def load_state_dict_in_mid_run(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 2:
            saved = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
        if step in (3, 4):
            job.model.load_state_dict(saved[0])
            job.optimizer.load_state_dict(saved[1])


@loop()
def parameters_overwritten_in_mid_flight(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step >= 3:
            with torch.no_grad():
                job.model.layers[1].weight.mul_(0.9)
                job.model.layers[0].weight.copy_(torch.full_like(job.model.layers[0].weight, 0.01))
                job.model.layers[2].weight.data.clamp_(-0.1, 0.1)


@loop(model=Convolutions)
def evaluation_between_steps(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        job.call.eval()
        with torch.no_grad():
            job.see("loss", job.loss())
        with torch.inference_mode():
            job.see("loss", job.loss())
        job.call.train()


@loop(model=Convolutions)
def averages_of_the_model(job: Job) -> None:
    average = torch.optim.swa_utils.AveragedModel(
        job.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for _ in range(STEPS):
        job.step()
        average.update_parameters(job.model)
    job.see("average", dict(average.module.named_parameters()))


def _use_copy(job: Job, name: str, other: nn.Module) -> None:
    """A copy holds the values of now, is plain, and lives on without any effect on the original."""
    job.see(name, {key: value.detach() for key, value in other.named_parameters()})
    assert all(type(param) is nn.Parameter for param in other.parameters())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    x, y = job.model.batch(torch.Generator().manual_seed(5))
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(other(x), y).backward()
        assert all(type(param.grad) is torch.Tensor for param in other.parameters())
        optimizer.step()
    job.see(f"{name}, trained", dict(other.named_parameters()))


@loop()
def deep_copies_in_mid_flight(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        _use_copy(job, "copy", copy.deepcopy(job.model))


@loop()
def pickles_in_mid_flight(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step % 2:
            _use_copy(job, "pickled", pickle.loads(pickle.dumps(job.model)))
        else:
            file = io.BytesIO()
            torch.save(job.model, file)
            file.seek(0)
            _use_copy(job, "saved", torch.load(file, weights_only=False))


@loop()
def a_shallow_copy_of_the_parameters(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        job.see("flat", nn.utils.parameters_to_vector(job.model.parameters()))
        job.see("last", job.model.layers[-1].weight.clone())


# -- parts of the model ------------------------------------------------------------------------------------------


@loop(model=TiedTransformer, optimizer=adam)
def tied_weights_and_attention(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class Branches(nn.Module):
    """A trunk, two branches of which any may be left out or taken in another order, and a part nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 50)
        self.left = nn.Linear(50, 50)
        self.right = nn.Linear(50, 50)
        self.head = nn.Linear(50, 6)
        self.never = nn.Linear(50, 50)
        self.taken = ("left", "right")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        for name in self.taken:
            x = x + torch.tanh(getattr(self, name)(x))
        return self.head(x)

    batch = staticmethod(Mlp.batch)


UNUSED = {"find_unused_parameters": True}


@loop(model=Branches, ddp=UNUSED, defers=None)
def a_branch_left_out_by_all_ranks_in_turns(job: Job) -> None:
    for step in range(STEPS):
        job.model.taken = ("left",) if step % 3 == 1 else ("left", "right") if step % 3 == 2 else ("right",)
        job.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def a_branch_left_out_by_one_rank_only(job: Job) -> None:
    for step in range(STEPS):
        job.model.taken = ("left", "right") if (step + job.rank) % 2 else ("left",)
        job.step()


@loop(model=Branches, optimizer=adam, ddp=UNUSED, defers=None)
def each_rank_in_a_branch_of_its_own(job: Job) -> None:
    for _ in range(STEPS):
        job.model.taken = ("left",) if job.rank else ("right",)
        job.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def unused_parts_whose_gradients_are_kept(job: Job) -> None:
    for step in range(STEPS):
        job.model.taken = ("left", "right") if step % 2 else ("left",)
        job.optimizer.zero_grad(set_to_none=step == 4)
        job.loss().backward()
        job.optimizer.step()


class OrderVaries(Branches):
    """Branches side by side: the order of the calls is the order of readiness, and does not change the result."""

    def __init__(self) -> None:
        super().__init__()
        del self.never

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        outputs = {name: torch.tanh(getattr(self, name)(x)) for name in self.taken}
        return self.head(outputs["left"] + outputs["right"])


@loop(model=OrderVaries)
def readiness_in_another_order_on_each_rank(job: Job) -> None:
    for step in range(STEPS):
        job.model.taken = ("left", "right") if (step + job.rank) % 2 else ("right", "left")
        job.step()


@loop(model=OrderVaries, attach={"order": "coordinator"})
def readiness_in_another_order_under_a_coordinator(job: Job) -> None:
    for step in range(STEPS):
        job.model.taken = ("left", "right") if (step + job.rank) % 2 else ("right", "left")
        job.step()


@loop(model=Convolutions, optimizer=adam, attach={"order": "coordinator"})
def a_coordinator(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=Branches, ddp=UNUSED, attach={"order": "coordinator"}, defers=None)
def a_coordinator_and_unused_parts(job: Job) -> None:
    for step in range(STEPS):
        job.model.taken = ("left", "right") if (step + job.rank) % 2 else ("left",)
        job.step()


class Checkpointed(Mlp):
    reentrant = False
    twice = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            for _ in range(2 if self.twice and layer.in_features == layer.out_features else 1):
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.layers[-1](x)


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


class CheckpointedTwice(Checkpointed):
    reentrant = True
    twice = True


@loop(model=Checkpointed)
def checkpoints(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=CheckpointedReentrantly, ddp={"static_graph": True})
def reentrant_checkpoints(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=CheckpointedTwice, ddp={"static_graph": True})
def reentrant_checkpoints_of_a_layer_used_twice(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class WholeCheckpointed(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@loop(model=WholeCheckpointed)
def a_checkpoint_around_everything(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


@loop(model=Frozen, optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
def frozen_parameters(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(ddp=UNUSED)
def parameters_frozen_in_mid_run(job: Job) -> None:
    for step in range(STEPS):
        if step == 4:
            job.model.layers[1].requires_grad_(False)
        job.step()


# -- optimizers that keep the barrier ---------------------------------------------------------------------------


@loop(optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3), defers=False, says="LBFGS")
def lbfgs_with_a_closure(job: Job) -> None:
    for _ in range(3):
        x, y = job.batch()

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            job.optimizer.zero_grad()
            loss = F.cross_entropy(job.call(x), y)
            loss.backward()
            return loss

        job.see("loss", job.optimizer.step(closure))


@loop(defers=False, says="closure")
def sgd_with_a_closure(job: Job) -> None:
    for _ in range(STEPS):

        def closure() -> torch.Tensor:
            job.optimizer.zero_grad()
            loss = job.loss()
            loss.backward()
            return loss

        job.optimizer.step(closure)


class NormedSgd(torch.optim.Optimizer):
    """One that nobody knows: its updates depend on the norm over all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.nn.utils.get_total_norm([param.grad for param in params])
        for param in params:
            param.add_(param.grad / norm, alpha=-0.1)
            self.state[param]["norm"] = norm


@loop(optimizer=lambda model: NormedSgd(model.parameters()), defers=False, says="the barrier is kept: NormedSgd is not known")
def an_optimizer_of_the_users_own(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class OwnSgd(torch.optim.SGD):
    """Known by its user to update each parameter from its own gradient alone."""


@loop(optimizer=lambda model: OwnSgd(model.parameters(), lr=0.1, momentum=0.9), attach={"cross_barrier": True})
def an_optimizer_that_its_user_vouches_for(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(attach={"cross_barrier": False}, defers=False)
def the_barrier_kept_on_request(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
def a_fused_optimizer(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, maximize=True, foreach=True))
def a_foreach_optimizer(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


# -- compiled and scripted ------------------------------------------------------------------------------------------


@loop()
def compiled_blocks(job: Job) -> None:
    torch.compiler.reset()
    for layer in job.model.layers:
        layer.compile(backend="aot_eager")
    for _ in range(STEPS):
        job.step()


@loop(defers=True, says="the whole model is compiled")
def a_compiled_model(job: Job) -> None:
    torch.compiler.reset()
    job.call = torch.compile(job.call, backend="aot_eager")
    for _ in range(STEPS):
        job.step()


@loop(defers=True, says="the whole model is compiled")
def a_model_compiled_in_place(job: Job) -> None:
    torch.compiler.reset()
    job.model.compile(backend="aot_eager")
    for _ in range(STEPS):
        job.step()


class Scripted(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = torch.jit.script(self.layers[1])


@loop(model=Scripted)
def a_scripted_part(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


# -- forward passes of every kind -----------------------------------------------------------------------------------


@loop()
def an_exception_in_forward_that_the_script_catches(job: Job) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bad batch")

    for step in range(STEPS):
        if step in (0, 3, 5):
            handle = job.model.layers[2].register_forward_pre_hook(fail)
            with contextlib.suppress(ValueError):
                job.step()
            handle.remove()
        job.step()


@loop()
def functional_calls(job: Job) -> None:
    prefix = "module." if job.session is None else ""
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch()
        scaled = {prefix + name: param * 0.9 for name, param in job.model.named_parameters()}
        F.cross_entropy(torch.func.functional_call(job.call, scaled, (x,)), y).backward()
        job.optimizer.step()


@loop()
def a_model_called_through_its_parts(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch()
        if job.session is None:
            output = job.call(x)
        else:
            for layer in job.model.layers[:-1]:
                x = torch.tanh(layer(x))
            output = job.model.layers[-1](x)
        F.cross_entropy(output, y).backward()
        job.optimizer.step()


@loop()
def two_forward_passes_and_one_backward(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        (job.loss() + job.loss()).backward()
        job.optimizer.step()


@loop()
def a_penalty_on_the_parameters(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.loss()
        (loss + 0.01 * sum(param.square().sum() for param in job.model.parameters())).backward()
        job.optimizer.step()


@loop()
def a_backward_pass_that_is_not_the_models(job: Job) -> None:
    other = nn.Linear(3, 1)
    for _ in range(STEPS):
        job.step()
        other(torch.ones(2, 3)).sum().backward()
        x = job.batch()[0].requires_grad_()
        job.see("gradient of the input", torch.autograd.grad(job.model(x).sum(), x)[0])


# -- dtypes and layouts ------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A part in float64 and a part in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Linear(12, 50, dtype=torch.float64), nn.Tanh(), nn.Linear(50, 30, dtype=torch.float64))
        self.coarse = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.coarse(self.fine(x.double()).float())

    batch = staticmethod(Mlp.batch)


@loop(model=Mixed, optimizer=adam)
def two_dtypes_in_one_model(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class Brain(Mlp):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


@loop(model=Brain)
def a_bfloat16_model(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=lambda: Convolutions().to(memory_format=torch.channels_last))
def a_channels_last_model(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        assert job.model.features[4].weight.is_contiguous(memory_format=torch.channels_last)


@loop(model=Convolutions, attach={"broadcast_buffers": False}, ddp={"broadcast_buffers": False})
def buffers_left_to_each_rank(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=Convolutions)
def buffers_and_accumulation(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.loss().backward()
        job.loss().backward()
        job.optimizer.step()


class Parametrized(Mlp):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.layers[1])
        torch.nn.utils.parametrizations.spectral_norm(self.layers[2])


@loop(model=Parametrized)
def parametrizations(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


# -- groups --------------------------------------------------------------------------------------------------------


def attach_to_some_ranks(rank: int, world: int) -> str:
    """What attach says to a group of rank 0 alone."""
    try:
        gradlane.attach(Mlp(), process_group=dist.new_group([0]), timeout=5)
    except UnsupportedError as error:
        return str(error)
    return "attached"


def train_in_a_group_of_all_ranks(rank: int, world: int) -> list[str]:
    case = Loop(LOOPS["buffers_and_accumulation"].run, Convolutions, adam, {}, {}, True, "")
    case.attach["process_group"] = dist.new_group(list(range(world)))
    return differences(under_ddp(case, rank), _under_gradlane(case, rank, world, gradlane.policies.get("blocks")))


def train_alike(rank: int, world: int, policy: str, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """State after some steps under DDP and under gradlane, for more ranks than two, where roundings differ."""
    case = Loop(LOOPS["accumulation_with_no_sync"].run, Mlp, momentum, {}, options, True, "")
    reference = under_ddp(case, rank)
    with slow_network():
        return reference, _under_gradlane(case, rank, world, gradlane.policies.get(policy, **POLICIES[policy]))


# -- loops that end in an error ----------------------------------------------------------------------------------


def unfinished_backward(rank: int, world: int, failing: list[int]) -> tuple[str, str]:
    """An exception inside backward that the script catches, on the `failing` ranks; then it goes on."""
    torch.manual_seed(7)
    model = Mlp()
    optimizer = momentum(model)
    policy = gradlane.policies.get("bytescheduler", **POLICIES["bytescheduler"])
    session = gradlane.attach(model, optimizer, policy, network=GIVEN, profile_iterations=1, timeout=20)
    generator = torch.Generator().manual_seed(1000 + rank)
    job = Job(rank, model, model, optimizer, session.no_sync, generator, session)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a bad gradient")

    try:
        for step in range(STEPS):
            x, y = job.batch()
            optimizer.zero_grad()
            hidden = model.layers[1](torch.tanh(model.layers[0](x)))
            if step == 3 and rank in failing:
                hidden.register_hook(fail)
            loss = F.cross_entropy(model(x), y) + hidden.mean()
            with contextlib.suppress(ValueError):
                loss.backward()
                optimizer.step()
    except JobError as error:
        return type(error).__name__, str(error)
    finally:
        session.close()
    return "nothing", ""
