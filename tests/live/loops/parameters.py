"""Parameters that are read, copied or replaced while updates are under way."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn
from torch.nn import functional as F

from tests.live.loops.job import HELD, STEPS, Job, Mlp, adam, loop
from tests.live.models import Convolutions


@loop(optimizer=adam, says=HELD)
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


@loop(optimizer=adam, says=HELD)
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


class TiedByData(Mlp):
    """Parameters of one memory, as a whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].bias.data = self.layers[1].bias.data
        self.layers[3].bias.data = self.layers[0].bias.data[3:9]


@loop(model=TiedByData, says=HELD)
def parameters_of_one_memory(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop()
def a_parameter_whose_contents_are_to_be_swapped(job: Job) -> None:
    """Torch refuses it where DDP has the parameter."""
    for step in range(STEPS):
        job.step()
        if step == 4:
            weight = job.model.layers[1].weight
            try:
                torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 0.9))
            except RuntimeError:
                job.see("refused", step)
