"""Buffers that the script or the model changes: between steps and in forward, on all ranks and on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.nn import functional as F

from tests.live.loops.job import STEPS, Job, Mlp, adam, loop
from tests.live.models import Convolutions


class Scaled(Mlp):
    """Its input is scaled by a buffer; others of other dtypes are masks and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(12))
        self.register_buffer("mask", torch.ones(12, dtype=torch.bool))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.zeros(12), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * self.scale + self.shift) * self.mask)


def _see_buffers(job: Job) -> None:
    for name, buffer in job.model.named_buffers():
        job.see(name, buffer)


def _train(job: Job, change: Callable[[int], Any], first: int = 0) -> None:
    """Buffers are changed after each step from the `first` on, and seen at every turn."""
    for step in range(STEPS):
        job.step()
        _see_buffers(job)
        if step >= first:
            change(step)
            _see_buffers(job)


# -- by a hook of the script's -------------------------------------------------------------------------------


class Counting(Scaled):
    """A pre-hook from before attach counts in a buffer, on each rank by its own step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(_count)


def _count(model: Any, _: Any) -> None:
    model.shift.add_(0.1 * (1 + dist.get_rank()))


@loop(model=Counting)
def a_buffer_changed_by_a_pre_hook(job: Job) -> None:
    _train(job, lambda step: None)


# -- by the script, between steps ----------------------------------------------------------------------------


@loop(model=Scaled)
def a_buffer_changed_alike_on_all_ranks(job: Job) -> None:
    _train(job, lambda step: job.model.scale.mul_(0.9))


@loop(model=Scaled)
def a_buffer_changed_on_rank_0(job: Job) -> None:
    _train(job, lambda step: job.rank == 0 and job.model.scale.mul_(0.9))


@loop(model=Scaled)
def a_buffer_changed_on_rank_1(job: Job) -> None:
    _train(job, lambda step: job.rank == 1 and job.model.scale.mul_(0.9))


@loop(model=Scaled)
def a_buffer_changed_on_rank_0_late(job: Job) -> None:
    _train(job, lambda step: job.rank == 0 and job.model.scale.mul_(0.5), first=4)


@loop(model=Convolutions)
def a_buffer_changed_on_rank_0_late_through_data(job: Job) -> None:
    _train(job, lambda step: job.rank == 0 and job.model.features[1].running_mean.data.mul_(0.5), first=4)


@loop(model=Scaled)
def a_buffer_changed_on_rank_0_late_before_an_evaluation(job: Job) -> None:
    def evaluate(step: int) -> None:
        if job.rank == 0:
            job.model.scale.data.mul_(0.5)
        job.call.eval()
        with torch.no_grad():
            job.see("evaluation", job.loss())
        job.call.train()

    _train(job, evaluate, first=4)


@loop(model=Scaled, optimizer=adam)
def a_buffer_changed_on_rank_1_late(job: Job) -> None:
    _train(job, lambda step: job.rank == 1 and job.model.scale.mul_(0.5), first=4)


@loop(model=Scaled)
def a_buffer_from_each_ranks_own_data(job: Job) -> None:
    _train(job, lambda step: job.model.scale.copy_(1 / (1 + job.batch()[0].std(dim=0))))


@loop(model=Scaled)
def a_buffer_changed_through_data(job: Job) -> None:
    _train(job, lambda step: job.model.scale.data.mul_(0.8 if job.rank else 0.9))


@loop(model=Scaled)
def a_buffer_changed_through_numpy(job: Job) -> None:
    def change(step: int) -> None:
        job.model.shift.numpy()[:] = 0.1 * (step + job.rank)

    _train(job, change)


@loop(model=Scaled)
def a_buffer_assigned_anew(job: Job) -> None:
    def change(step: int) -> None:
        job.model.scale = job.model.scale * 0.9

    _train(job, change)


@loop(model=Scaled)
def a_buffer_assigned_anew_on_rank_0(job: Job) -> None:
    def change(step: int) -> None:
        if job.rank == 0:
            job.model.scale = job.model.scale * 0.9

    _train(job, change, first=3)


@loop(model=Scaled)
def a_mask_that_each_rank_draws(job: Job) -> None:
    _train(job, lambda step: job.model.mask.copy_(torch.rand(12, generator=job.generator) < 0.8))


@loop(model=Scaled)
def buffers_loaded_on_rank_0(job: Job) -> None:
    def load(step: int) -> None:
        if job.rank == 0:
            job.model.load_state_dict({"scale": torch.full((12,), 0.1 * step)}, strict=False)

    _train(job, load, first=3)


@loop(model=Scaled, attach={"broadcast_buffers": False}, ddp={"broadcast_buffers": False})
def buffers_of_its_own_on_each_rank(job: Job) -> None:
    _train(job, lambda step: job.model.scale.copy_(1 / (1 + job.batch()[0].std(dim=0))))


@loop(model=Scaled)
def a_buffer_changed_between_micro_steps(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        for last in (False, True):
            job.model.scale.mul_(0.9 if job.rank else 0.95)
            if last:
                job.backward()
            else:
                with job.no_sync():
                    job.backward()
            _see_buffers(job)
        job.optimizer.step()


@loop(model=Scaled)
def a_buffer_changed_between_forward_and_backward(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.loss()
        job.see("loss", loss)
        job.model.shift.add_(0.1 + job.rank)
        loss.backward()
        _see_buffers(job)
        job.optimizer.step()


# -- by the model, in forward --------------------------------------------------------------------------------


class Averaging(Scaled):
    """Its buffers follow its inputs: assigned anew, in place, and counted."""

    shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.shift = self.shift * 0.9 - x.detach().mean(dim=0) * 0.1
            self.scale.lerp_(1 / (1 + x.detach().std(dim=0)), 0.1)
            self.seen += len(x)
        return super().forward(x) * (1 + self.seen / 100)


@loop(model=Averaging)
def buffers_that_follow_the_inputs(job: Job) -> None:
    _train(job, lambda step: None)


@loop(model=Averaging)
def buffers_that_follow_the_inputs_under_accumulation(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.backward()
        job.backward()
        job.optimizer.step()
        _see_buffers(job)


@loop(model=Averaging)
def forward_passes_for_buffers_alone(job: Job) -> None:
    def follow(step: int) -> None:
        with torch.no_grad():
            job.see("output", job.call(job.batch()[0]))

    _train(job, follow)


class Queued(Mlp):
    """MoCo's queue: outputs of the last batches are what those of the next are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.linspace(-1, 1, 32 * 6).sin().view(32, 6), dim=1))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = F.normalize(super().forward(x), dim=1)
        logits = torch.cat([output, output @ self.queue.clone().t()], dim=1)
        if self.training:
            start = int(self.next)
            self.queue[start : start + len(x)] = output.detach()
            self.next[0] = (start + len(x)) % len(self.queue)
        return logits


@loop(model=Queued)
def a_queue_of_outputs(job: Job) -> None:
    _train(job, lambda step: None)


@loop(model=Queued)
def a_queue_of_outputs_that_rank_1_empties(job: Job) -> None:
    _train(job, lambda step: job.rank == 1 and job.model.queue.zero_(), first=3)


class Centred(Mlp):
    """A centre loss: the buffer is what the loss pulls outputs to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(6, 6))


@loop(model=Centred)
def a_buffer_in_the_loss(job: Job) -> None:
    for _ in range(STEPS):
        x, y = job.batch()
        job.optimizer.zero_grad()
        output = job.call(x)
        loss = F.cross_entropy(output, y) + (output - job.model.centres[y]).square().mean()
        job.see("loss", loss)
        loss.backward()
        job.optimizer.step()
        with torch.no_grad():
            for one, output_of_one in zip(y.tolist(), output.detach(), strict=True):
                job.model.centres[one].lerp_(output_of_one, 0.2)
        _see_buffers(job)


# -- BatchNorm -----------------------------------------------------------------------------------------------


@loop(model=Convolutions)
def running_statistics_reset(job: Job) -> None:
    def reset(step: int) -> None:
        if step in (3, 5):
            job.model.features[1].reset_running_stats()
        job.model.eval()
        with torch.no_grad():
            job.see("evaluation", job.loss())
        job.model.train()

    _train(job, reset)


@loop(model=Convolutions)
def running_statistics_reset_on_rank_0(job: Job) -> None:
    _train(job, lambda step: job.rank == 0 and job.model.features[1].reset_running_stats(), first=3)


@loop(model=Convolutions)
def momentum_of_batch_norm_changed(job: Job) -> None:
    def change(step: int) -> None:
        job.model.features[5].momentum = 0.1 / (step + 1)

    _train(job, change)


@loop(model=Convolutions)
def batch_norm_evaluated_while_training(job: Job) -> None:
    for step in range(STEPS):
        job.model.features[1].train(step % 2 == 0)
        job.model.features[5].train(step < 3)
        job.step()
        _see_buffers(job)


class FrozenFeatures(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.features.requires_grad_(False)


@loop(model=FrozenFeatures, optimizer=lambda model: torch.optim.SGD(model.classifier.parameters(), lr=0.1))
def buffers_of_a_frozen_part(job: Job) -> None:
    def change(step: int) -> None:
        job.model.features[1].running_mean.add_(0.1 * (1 + job.rank))
        job.model.features[1].train(step % 2 == 0)

    _train(job, change)


@loop(model=Convolutions)
def statistics_taken_anew_by_update_bn(job: Job) -> None:
    def anew(step: int) -> None:
        if step in (3, STEPS - 1):
            torch.optim.swa_utils.update_bn([job.batch()[0] for _ in range(3)], job.call)

    _train(job, anew)


@loop(model=Convolutions)
def evaluation_of_another_kind_on_each_rank(job: Job) -> None:
    def evaluate(step: int) -> None:
        job.model.train(job.rank == 1)  # forgotten on one
        with torch.no_grad():
            job.see("evaluation", job.loss())
        job.model.train()

    _train(job, evaluate)


def _evaluate(job: Job) -> None:
    job.model.eval()
    with torch.no_grad():
        job.see("evaluation", job.loss())
    job.model.train()


@loop(model=Convolutions, attach={"verify": True}, says=None)
def an_evaluation_on_one_rank_alone_between_steps(job: Job) -> None:
    """Before a further step, whose buffers torch's class exchanges in the evaluation already."""

    def evaluate(step: int) -> None:
        for _ in range(step % 3 if step % 2 == job.rank and step < STEPS - 1 else 0):
            _evaluate(job)

    _train(job, evaluate)


@loop(model=Convolutions, attach={"verify": True}, defers=None, says=None)
def a_pass_in_training_mode_without_gradients_on_one_rank_alone(job: Job) -> None:
    """It moves that rank's running statistics, which are rank 0's again in the next step."""
    for step in range(STEPS):
        if step > 1 and step % 3 == job.rank:  # torch's class exchanges something else before the second step
            with torch.no_grad():
                job.see("statistics", job.loss())
        job.backward()
        _see_buffers(job)
        job.optimizer.step()
        job.optimizer.zero_grad()


@loop(model=Convolutions, defers=None, says=None)
def passes_in_evaluation_mode_between_those_of_an_accumulation(job: Job) -> None:
    """DDP broadcasts buffers before the forward pass that follows any that summed, whatever its mode was."""
    for _ in range(STEPS):
        with job.no_sync():
            job.loss().backward()
        job.model.eval()
        job.loss().backward()
        job.model.train()
        job.loss().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


@loop(model=Convolutions, defers=None, says=None)
def a_model_trained_in_evaluation_mode(job: Job) -> None:
    """Running statistics are used and not changed, as in fine-tuning."""
    job.model.eval()
    _train(job, lambda step: None)


class Redirected(Convolutions):
    """Its forward pass calls the model once more, and a metric averages over the ranks there: Lightning's `training_step`."""

    def forward(self, x: torch.Tensor, redirected: bool = True) -> torch.Tensor:
        if not redirected:
            return super().forward(x)
        outputs = self(x, redirected=False)
        dist.all_reduce(outputs.detach().mean())
        return outputs


@loop(model=Redirected)
def a_forward_pass_that_calls_the_model(job: Job) -> None:
    _train(job, lambda step: None)


@loop(model=Redirected)
def a_forward_pass_that_calls_the_model_and_may_raise(job: Job) -> None:
    def fail(step: int) -> None:
        for redirected in (True, False):
            with contextlib.suppress(RuntimeError, ValueError):
                job.call(torch.zeros(3), redirected=redirected)

    _train(job, fail)


class Raising(Convolutions):
    """An error leaves its forward pass when its running statistics have changed: too little memory for what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = False
        self.features[5].register_forward_hook(self._refuse)

    def _refuse(self, *_: Any) -> None:
        if self.raises:
            raise MemoryError


def _try_in_vain(job: Job) -> None:
    job.model.raises = True
    with contextlib.suppress(MemoryError):
        job.loss()
    job.model.raises = False
    _see_buffers(job)


@loop(model=Raising)
def a_forward_pass_that_raises_once_its_buffers_have_changed(job: Job) -> None:
    """DDP broadcasts buffers again before the next one: that one has not ended."""

    def fail(step: int) -> None:
        for _ in range(step % 3):
            _try_in_vain(job)
        if step % 2 == 0:
            job.model.eval()
            with torch.no_grad():
                job.see("evaluation", job.loss())
            job.model.train()

    _train(job, fail)


@loop(model=Raising, attach={"verify": True}, says=None)
def buffers_that_stay_each_ranks_own_after_a_pass_that_does_not_sum(job: Job) -> None:
    """As DDP has it, and the verification of its steps too."""
    for step in range(STEPS):
        for _ in range(step % 4):
            with job.no_sync():
                job.backward()
            _see_buffers(job)
        if step % 3 == 1:
            _try_in_vain(job)
        if step % 5 == 2:
            with torch.no_grad():
                job.call(job.batch()[0])
        job.backward()
        _see_buffers(job)
        job.optimizer.step()
        job.optimizer.zero_grad()


@loop(model=Convolutions, defers=None, says=None)
def averages_swapped_in_through_data_for_an_evaluation(job: Job) -> None:
    """As Lightning's WeightAveraging does it: no tensor's version tells of it, and ranks average other statistics."""
    averages = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}

    def swap() -> None:
        for name, tensor in job.model.state_dict().items():
            kept = averages[name].clone()
            averages[name].copy_(tensor)
            tensor.data.copy_(kept)

    def evaluate(step: int) -> None:
        for name, tensor in job.model.state_dict().items():
            if tensor.is_floating_point():
                averages[name].mul_(0.5).add_(tensor * 0.5)
        if step % 2:
            swap()
            job.call.eval()
            with torch.no_grad():
                job.see("evaluation", job.loss())
            job.call.train()
            swap()

    _train(job, evaluate)
