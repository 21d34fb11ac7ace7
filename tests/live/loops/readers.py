"""Parameters read past torch's functions: by C++, as bytes and pointers, in another thread, by the script's collectives."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.cpp_extension import load_inline

from tests.live.loops.job import HELD, PROBE, STEPS, Job, Mlp, adam, after_steps, loop
from tests.live.models import TiedTransformer

# -- by C++ ----------------------------------------------------------------------------------------------------

CPP = """
#include <torch/csrc/autograd/python_variable.h>

static PyObject* copied(PyObject*, PyObject* given) {
  return THPVariable_Wrap(THPVariable_Unpack(given).detach().clone());
}

static PyMethodDef methods[] = {{"copied", copied, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef reader = {PyModuleDef_HEAD_INIT, "reader", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_reader() { return PyModule_Create(&reader); }
"""


@functools.cache
def _reader() -> Any:
    """An extension whose `copied(tensor)` reads the tensor's memory; rank 0 compiles it, once for all ranks in this folder."""
    store, folder = dist.distributed_c10d._get_default_store(), Path(os.environ["RANKS_FOLDER"])
    if dist.get_rank() == 0:
        (folder / "lock").unlink(missing_ok=True)  # of a rank that was ended while it compiled
    else:
        # half a minute of one processor, so that a collective would give up on a busy one
        store.wait(["reader"], timedelta(seconds=110))
    module = load_inline("reader", [CPP], build_directory=str(folder), no_implicit_headers=True, extra_cflags=["-O0"])
    store.set("reader", "compiled")
    return module


class ByCpp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ _reader().copied(weight).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class LayersByCpp(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(ByCpp.apply(x, layer.weight) + layer.bias)
        return self.layers[-1](x)


@loop(model=LayersByCpp, defers=None)
def layers_that_read_their_weights_in_cpp(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(optimizer=adam, defers=None)
def parameters_read_in_cpp_after_each_step_and_a_flush(job: Job) -> None:
    reader = _reader()

    def read() -> torch.Tensor:
        if job.session is not None:  # nothing in Python sees who reads here
            job.session.flush()
        return torch.stack([reader.copied(param).double().sum() for param in job.model.parameters()])

    after_steps(job, read)


@loop(model=TiedTransformer, optimizer=adam, defers=None)
def an_encoder_evaluated_on_its_fast_path(job: Job) -> None:
    """In evaluation a layer is one C++ function, as long as nothing overrides torch's functions."""
    tokens = torch.arange(24).view(2, 12)
    for _ in range(STEPS):
        job.step()
        job.call.eval()
        with torch.no_grad():
            job.see("evaluation", job.call(tokens))
        job.call.train()


class Recurrent(nn.Module):
    """Its weights go to C++ as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 40, num_layers=2, batch_first=True)
        self.head = nn.Linear(40, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x.view(-1, 4, 3))[0][:, -1])

    batch = staticmethod(Mlp.batch)


@loop(model=Recurrent, defers=None)
def a_recurrent_network(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        with torch.no_grad():
            job.see("evaluation", job.model(PROBE))


# -- as bytes, numbers and pointers ----------------------------------------------------------------------------


def _digest(data: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(b"".join(data)).digest()), dtype=torch.uint8)


@loop(defers=None)
def weights_hashed(job: Job) -> None:
    after_steps(job, lambda: _digest([param.detach().numpy().tobytes() for param in job.model.parameters()]))


@loop(defers=None)
def weights_hashed_by_their_storage(job: Job) -> None:
    after_steps(job, lambda: _digest([bytes(job.model.layers[0].weight.untyped_storage())]))


@loop(defers=None)
def weights_as_lists(job: Job) -> None:
    after_steps(job, lambda: torch.tensor([value for param in job.model.parameters() for value in param.flatten().tolist()]))


@loop(defers=None, says=HELD)
def numpy_views_of_weights_taken_once(job: Job) -> None:
    views = [param.detach().numpy() for param in job.model.parameters()]
    after_steps(job, lambda: torch.cat([torch.tensor(view).flatten() for view in views]))


@loop(defers=None, says=HELD)
def weights_detached_once(job: Job) -> None:
    detached = [param.detach() for param in job.model.parameters()]
    after_steps(job, lambda: torch.cat([param.flatten() for param in detached]))


@loop(defers=None)
def weights_by_dlpack(job: Job) -> None:
    after_steps(job, lambda: torch.cat([torch.from_dlpack(param.detach()).flatten() for param in job.model.parameters()]))


@loop(defers=None)
def weights_compared_to_those_before(job: Job) -> None:
    before = [param.detach().clone() for param in job.model.parameters()]
    where = [param.data_ptr() for param in job.model.parameters()]
    for _ in range(STEPS):
        job.step()
        params = list(job.model.parameters())
        job.see("moved", [param.data_ptr() for param in params] != where)
        job.see("equal", [torch.equal(param, was) for param, was in zip(params, before, strict=True)])
        before = [param.detach().clone() for param in params]


@loop(optimizer=adam, defers=None)
def parameters_summed(job: Job) -> None:
    after_steps(job, lambda: float(sum(param.sum() for param in job.model.parameters())))


@loop(defers=None)
def an_evaluation_in_another_thread(job: Job) -> None:
    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return job.model(PROBE)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        after_steps(job, lambda: pool.submit(evaluate).result())


# -- sent by the script ----------------------------------------------------------------------------------------
# says: a thread of torch.distributed may hold a tensor for a moment after the call has returned


@loop(defers=None, says=None)
def parameters_gathered_by_the_script(job: Job) -> None:
    def gathered() -> torch.Tensor:
        both = []
        for param in job.model.parameters():
            parts = [torch.empty(param.shape) for _ in range(2)]
            dist.all_gather(parts, param)
            both += [part.detach().flatten() for part in parts]
        return torch.cat(both)

    after_steps(job, gathered)


@loop(defers=None, says=None)
def parameters_broadcast_by_the_script(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step >= 3:
            with torch.no_grad():
                for param in job.model.parameters():
                    dist.broadcast(param, 0)


@loop(defers=None, says=None)
def parameters_averaged_by_the_script(job: Job) -> None:
    for step in range(STEPS):
        with job.no_sync():
            job.step()
        if step % 2:
            job.step()
            for param in job.model.parameters():
                dist.all_reduce(param.data)
                param.data /= 2


# -- functions of the script's own, and tensor classes that ask no other class -----------------------------


class SavesOnly(torch.autograd.Function):
    """Saves a weight for its backward pass, and reads it there alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0].mean(), None


class LayersThatSave(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(SavesOnly.apply(x, layer.weight)))
        return self.layers[-1](x)


@loop(model=LayersThatSave)
def functions_that_save_weights_and_do_not_read_them(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class Jagged(nn.Module):
    """Nested tensors of tokens; their embedding is the output's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.linear(x.values(), self.embedding.weight)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [torch.randint(20, (length,), generator=generator) for length in (3, 5, 2)]
        return torch.nested.nested_tensor(parts, layout=torch.jagged), torch.cat(parts)


@loop(model=Jagged)
def nested_tensors(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(model=Jagged)
def nested_tensors_and_a_penalty_on_their_weights(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.loss() + 0.01 * sum(param.square().sum() for param in job.model.parameters())
        job.see("loss", loss)
        loss.backward()
        job.optimizer.step()


class Asking(torch.Tensor):
    """Runs torch's functions with those of all tensor classes turned off."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@loop()
def inputs_of_a_class_that_asks_no_other(job: Job) -> None:
    for _ in range(STEPS):
        x, y = job.batch()
        job.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(job.call(x.as_subclass(Asking)), y)
        job.see("loss", loss)
        loss.backward()
        job.optimizer.step()
