"""The state of model and optimizer, rolled back, reset, read and replaced while updates are owed."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

from tests.live.loops.job import HELD, STEPS, Job, adam, loop, momentum
from tests.live.models import Convolutions

READ = "reads gradients"

# -- rolled back ---------------------------------------------------------------------------------------------


def _roll_back(job: Job, restore: Callable[[Any, Any], Any]) -> None:
    """After step 2 everything is copied, and after steps 3 and 5 `restore(model's, optimizer's)` puts some of it back."""
    for step in range(STEPS + 1):
        job.step()
        if step == 2:
            saved = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
        if step in (3, 5):
            restore(*saved)


@loop(says=HELD)
def the_model_rolled_back_then_its_optimizer(job: Job) -> None:
    def restore(model: Any, optimizer: Any) -> None:
        job.model.load_state_dict(model)
        job.optimizer.load_state_dict(optimizer)

    _roll_back(job, restore)


@loop(optimizer=adam, says=HELD)
def the_optimizer_rolled_back_then_its_model(job: Job) -> None:
    def restore(model: Any, optimizer: Any) -> None:
        job.optimizer.load_state_dict(optimizer)
        job.model.load_state_dict(model)

    _roll_back(job, restore)


@loop(says=HELD)
def the_optimizer_alone_rolled_back(job: Job) -> None:
    _roll_back(job, lambda model, optimizer: job.optimizer.load_state_dict(optimizer))


@loop(optimizer=adam)
def the_model_alone_rolled_back(job: Job) -> None:
    _roll_back(job, lambda model, optimizer: job.model.load_state_dict(model))


@loop()
def some_layers_rolled_back_without_strictness(job: Job) -> None:
    def restore(model: Any, _: Any) -> None:
        some = {name: value for name, value in model.items() if "1." in name}
        job.model.load_state_dict(some, strict=False)

    _roll_back(job, restore)


@loop()
def one_layer_rolled_back(job: Job) -> None:
    def restore(model: Any, _: Any) -> None:
        job.model.layers[2].load_state_dict({"weight": model["layers.2.weight"], "bias": model["layers.2.bias"]})

    _roll_back(job, restore)


@loop(model=Convolutions)
def a_model_with_buffers_rolled_back(job: Job) -> None:
    _roll_back(job, lambda model, optimizer: job.model.load_state_dict(model))


@loop(says=HELD, defers=None)
def everything_rolled_back_between_backward_and_step(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        if step == 2:
            saved = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
        if step in (3, 5):
            job.model.load_state_dict(saved[0])
            job.optimizer.load_state_dict(saved[1])
        job.optimizer.step()


@loop(says=HELD)
def everything_rolled_back_when_the_loss_rises(job: Job) -> None:
    best: Any = None
    for _ in range(STEPS + 3):
        loss = float(job.step().detach())
        mean = torch.tensor(loss)
        dist.all_reduce(mean)  # all ranks decide alike
        if best is None or float(mean) < best[0]:
            best = float(mean), copy.deepcopy(job.model.state_dict()), copy.deepcopy(job.optimizer.state_dict())
        else:
            job.model.load_state_dict(best[1])
            job.optimizer.load_state_dict(best[2])


@loop(optimizer=adam)
def the_best_model_restored_at_the_end(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 4:
            best = {name: value.clone() for name, value in job.model.state_dict().items()}
    job.model.load_state_dict(best)


@loop(says=HELD)
def saved_to_a_file_and_resumed(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 3:
            file = io.BytesIO()
            torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "step": step}, file)
        if step == 5:
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            job.optimizer.load_state_dict(saved["optimizer"])
            job.model.load_state_dict(saved["model"])


@loop(optimizer=adam, says=HELD)
def a_checkpoint_that_rank_0_sends_to_all(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step in (3, 5):
            sent: list[Any] = [None]
            if job.rank == 0:
                sent = [copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))]
            dist.broadcast_object_list(sent)
            job.model.load_state_dict(sent[0][0])
            job.optimizer.load_state_dict(sent[0][1])


@loop(defers=None, says=None)
def the_order_of_the_optimizers_state(job: Job) -> None:
    """Entries are made by the first step, in the order of the parameters."""
    for step in range(STEPS):
        job.step()
        if step == 1:
            job.optimizer.state.clear()  # the next step makes them anew, when sums are late
        if step >= 2:
            copies = copy.deepcopy((job.model, job.optimizer))[1]  # the model's updates are made first
            job.see("state", torch.cat([entry["momentum_buffer"].flatten() for entry in copies.state.values()]))


# -- by torch.distributed.checkpoint ---------------------------------------------------------------------------


@loop()
def the_models_state_by_dcp(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 2:
            saved = copy.deepcopy(dcp.get_model_state_dict(job.model))
            job.see("saved", saved)
        if step in (3, 5):
            dcp.set_model_state_dict(job.model, saved)


@loop(optimizer=adam, says=HELD)
def the_optimizers_state_by_dcp(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 2:
            saved = copy.deepcopy(dcp.get_optimizer_state_dict(job.model, job.optimizer))
        if step in (3, 5):
            dcp.set_optimizer_state_dict(job.model, job.optimizer, saved)


@loop()
def both_states_by_dcp(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step in (2, 4):
            saved = copy.deepcopy(dcp.get_state_dict(job.model, job.optimizer))
        if step in (3, 5):
            dcp.set_state_dict(job.model, job.optimizer, model_state_dict=saved[0], optim_state_dict=copy.deepcopy(saved[1]))


# -- the optimizer's state, by hand ----------------------------------------------------------------------------


def _from_step_3(job: Job, change: Callable[[], Any]) -> None:
    for step in range(STEPS):
        job.step()
        if step >= 3:
            change()


def _states(job: Job) -> list[dict[str, Any]]:
    return [job.optimizer.state[param] for param in job.model.parameters()]


@loop(says=HELD, defers=None)
def the_optimizers_state_cleared(job: Job) -> None:
    _from_step_3(job, job.optimizer.state.clear)


@loop(optimizer=adam)
def the_optimizers_state_replaced_by_an_empty_one(job: Job) -> None:
    def reset() -> None:
        job.optimizer.state = collections.defaultdict(dict)

    _from_step_3(job, reset)


@loop()
def the_state_of_one_layer_deleted(job: Job) -> None:
    def forget() -> None:
        for param in job.model.layers[1].parameters():
            del job.optimizer.state[param]

    _from_step_3(job, forget)


@loop()
def momentum_zeroed_in_place(job: Job) -> None:
    _from_step_3(job, lambda: [state["momentum_buffer"].zero_() for state in _states(job)])


@loop()
def momentum_replaced(job: Job) -> None:
    def replace() -> None:
        for state in _states(job):
            state["momentum_buffer"] = state["momentum_buffer"] * 0.5

    _from_step_3(job, replace)


@loop(optimizer=adam)
def moments_halved_and_steps_reset(job: Job) -> None:
    def decay() -> None:
        for state in _states(job):
            state["exp_avg"].mul_(0.5)
            state["exp_avg_sq"] = state["exp_avg_sq"] * 0.5
            state["step"].zero_()

    _from_step_3(job, decay)


# says: a thread of torch.distributed may hold a tensor for a moment after the call has returned
@loop(says=None)
def momentum_averaged_over_ranks(job: Job) -> None:
    def average() -> None:
        for state in _states(job):
            dist.all_reduce(state["momentum_buffer"])
            state["momentum_buffer"].mul_(0.5)

    _from_step_3(job, average)


@loop(says=HELD)
def momentum_logged_after_each_step(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        for state in _states(job):
            job.see("momentum", state["momentum_buffer"].norm())


@loop(optimizer=adam, says=HELD)
def moments_logged_before_each_step(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        if step:
            for state in job.optimizer.state.values():
                job.see("mean", state["exp_avg"].abs().mean())
                job.see("scale", state["exp_avg_sq"].sqrt().mean())
        job.optimizer.step()


@loop(says=HELD, defers=None)
def a_state_dict_kept_without_copying(job: Job) -> None:
    job.step()
    model, optimizer = job.model.state_dict(), job.optimizer.state_dict()
    for _ in range(STEPS):
        job.see("model", model)
        job.see("momentum", optimizer["state"][0]["momentum_buffer"])
        job.step()


@loop(says=HELD)
def a_checkpoint_that_rank_0_keeps_until_it_is_deleted(job: Job) -> None:
    """Held in every step that could defer updates, more than five of them, so that all of rank 0's come after it."""
    checkpoint = {"model": job.model.state_dict()} if job.rank == 0 else {}
    for _ in range(STEPS + 2):
        job.step()
    del checkpoint
    for _ in range(3):
        job.step()


# -- optimizers that come and change -----------------------------------------------------------------------------


@loop(defers=None, says=READ)
def an_optimizer_made_anew(job: Job) -> None:
    for step in range(STEPS):
        if step == 4:
            job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.8)
        job.step()


@loop(optimizer=adam, defers=None, says=READ)
def an_optimizer_made_anew_with_the_state_of_the_one_before(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step in (3, 5):
            saved = job.optimizer.state_dict()
            job.optimizer = torch.optim.Adam(job.model.parameters(), lr=0.02)
            job.optimizer.load_state_dict(saved)


@loop(optimizer=lambda model: momentum(model.layers[:3]), defers=None)
def a_parameter_group_added(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 3:
            job.optimizer.add_param_group({"params": job.model.layers[3].parameters(), "lr": 0.01, "momentum": 0.5})


@loop(optimizer=adam)
def parameter_groups_regrouped(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 3:
            first, *rest = job.optimizer.param_groups[0]["params"]
            job.optimizer.param_groups[0]["params"] = rest
            job.optimizer.add_param_group({"params": [first], "lr": 0.001})


# -- other weights for an evaluation -----------------------------------------------------------------------------


def _evaluate(job: Job) -> None:
    with torch.no_grad():
        job.see("evaluation", job.loss(job.model))


@loop()
def averaged_weights_copied_in_for_an_evaluation(job: Job) -> None:
    averages = [param.detach().clone() for param in job.model.parameters()]
    for _ in range(STEPS):
        job.step()
        torch._foreach_lerp_(averages, [param.detach() for param in job.model.parameters()], 0.1)
        kept = [param.detach().clone() for param in job.model.parameters()]
        for param, average in zip(job.model.parameters(), averages, strict=True):
            param.data.copy_(average)
        _evaluate(job)
        for param, own in zip(job.model.parameters(), kept, strict=True):
            param.data.copy_(own)


@contextlib.contextmanager
def _swapped(model: nn.Module, others: list[torch.Tensor]) -> Any:
    own = [param.data for param in model.parameters()]
    for param, other in zip(model.parameters(), others, strict=True):
        param.data = other
    yield
    for param, data in zip(model.parameters(), own, strict=True):
        param.data = data


@loop(optimizer=adam)
def averaged_weights_swapped_in_for_an_evaluation(job: Job) -> None:
    averages = [param.detach().clone() for param in job.model.parameters()]
    for _ in range(STEPS):
        job.step()
        torch._foreach_lerp_(averages, list(job.model.parameters()), 0.1)
        with _swapped(job.model, averages):
            _evaluate(job)


@loop()
def first_weights_swapped_in_for_an_evaluation(job: Job) -> None:
    first = [param.detach().clone() for param in job.model.parameters()]
    for _ in range(STEPS):
        job.step()
        with _swapped(job.model, first):
            _evaluate(job)


@loop(defers=None, says=HELD)
def weak_references_to_state(job: Job) -> None:
    references: list[Any] = []
    for _ in range(STEPS):
        job.step()
        state = job.optimizer.state if not references else {}
        references += [weakref.ref(each["momentum_buffer"]) for each in state.values()]
        for reference in references:
            job.see("by a weak reference", reference().sum())
