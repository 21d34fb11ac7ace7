"""Models whose parts are tied, left out, taken in another order, checkpointed or frozen."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.live.loops.job import STEPS, Job, Mlp, adam, loop
from tests.live.models import Convolutions, TiedTransformer


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


class CheckpointedAside(Mlp):
    """Its forward pass leaves a second loss beside what it returns. The backward pass comes to that loss first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        output = self.layers[-1](x)
        self.aside = checkpoint(self.layers[-2], x, use_reentrant=True).square().mean()
        return output


@loop(model=CheckpointedAside)
def a_reentrant_checkpoint_that_the_output_does_not_show(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        (job.loss() + job.model.aside).backward()
        job.optimizer.step()


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


class _Sharded(Mlp):
    """Each rank has a shard and a buffer of its own, of its own size, which DDP is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        self.shard = nn.Linear(6, 6 + rank)
        nn.init.constant_(self.shard.weight, 0.1 + rank)
        nn.init.constant_(self.shard.bias, rank)
        self.shard.register_buffer("seen", torch.full((2 + rank,), float(rank)))
        self.register_buffer("mine", torch.full((2,), float(rank)))
        self.register_buffer("ours", torch.ones(2))
        self.scale = nn.Parameter(torch.full((6,), 1.0 + rank))  # of the model itself: DDP sums its gradient all the same
        names = ["shard.weight", "shard.bias", "shard.seen", "mine", "scale"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shard.seen.add_(1)
        out = torch.tanh(super().forward(x) * self.scale * self.ours.sum())
        return out + self.shard(out)[:, :6] * self.mine.sum()


@loop(model=_Sharded, optimizer=adam)
def tensors_that_ddp_is_told_to_ignore(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        job.see("buffers", dict(job.model.named_buffers()))
        if step == 3:
            job.model.ours.mul_(0.5 + job.rank)  # rank 0's is sent to all
            job.model.mine.add_(0.5)
