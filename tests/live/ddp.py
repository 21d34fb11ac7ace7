"""What ranks do with gradlane.DistributedDataParallel, beside what they do with torch's."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import gradlane
from gradlane.errors import UnsupportedError
from gradlane.live.torch_versions import RELEASE
from tests.live.cases import differences
from tests.live.loops import GIVEN, Mlp, adam, bits, log_lines, momentum
from tests.live.loops.buffers import Raising, Scaled
from tests.live.loops.parts import CheckpointedAside
from tests.live.models import Convolutions
from tests.live.networks import counting_deferred_updates, network_until_awaited, slow_network

OPTIONS = {"policy": "blocks", "network": GIVEN, "profile_iterations": 1, "timeout": 20}
Loop = Callable[[Any, Any, torch.Generator], list[Any]]


def _wrap(model: nn.Module, **kwargs: Any) -> gradlane.DistributedDataParallel:
    return gradlane.DistributedDataParallel(model, options=OPTIONS, **kwargs)


def train_step(
    call: Any, model: Any, optimizer: Any, generator: torch.Generator, step: Callable[[], Any] | None = None
) -> None:
    x, y = model.batch(generator)
    optimizer.zero_grad()
    F.cross_entropy(call(x), y).backward()
    (step or optimizer.step)()


def close(wrapper: Any) -> None:
    """End the session of `wrapper`, if it is gradlane's and has one."""
    if isinstance(wrapper, gradlane.DistributedDataParallel) and wrapper.session is not None:
        wrapper.session.close()


def _trained(rank: int, wrap: Callable[..., Any], loop: Callable[[Any, Any, torch.Generator], Any]) -> tuple[Any, Any]:
    """Bits after `loop(wrapper, model, generator)`, and what the loop returned."""
    torch.manual_seed(7)
    model = Mlp()
    wrapper = wrap(model)
    try:
        found = loop(wrapper, model, torch.Generator().manual_seed(1000 + rank))
        return bits(model, None), found
    finally:
        close(wrapper)


def _beside_torchs(
    train: Callable[[Callable[..., Any]], Any], about: str, wrap: Callable[..., Any] = _wrap
) -> tuple[list[str], list[str]]:
    """What `train` leaves otherwise under gradlane's class than under torch's, and the logged lines with `about` in them."""
    reference = train(TorchDDP)
    with log_lines() as lines, slow_network():
        found = train(wrap)
    return differences(reference, found), [line for line in lines if about in line]


def compare(rank: int, world: int, name: str) -> tuple[list[str], Any, list[str]]:
    """What differs from torch's class after the loop of that name, what the loop returned, and what was logged."""
    reference, _ = _trained(rank, TorchDDP, LOOPS[name])
    with log_lines() as lines, slow_network():
        found, answer = _trained(rank, _wrap, LOOPS[name])
    return differences(reference, found), answer, lines


def joins(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """Five steps, then rank 0 has five inputs more than rank 1, then five steps."""
    optimizer = momentum(model)
    for _ in range(5):
        train_step(wrapper, model, optimizer, generator)
    with wrapper.join():
        for _ in range(5 if torch.distributed.get_rank() == 0 else 1):
            train_step(wrapper, model, optimizer, generator)
    return getattr(wrapper, "session", None) is None


def joins_as_one_of_several(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    optimizer = momentum(model)
    for _ in range(5):
        train_step(wrapper, model, optimizer, generator)
    with Join([wrapper]):
        for _ in range(5 if torch.distributed.get_rank() == 0 else 2):
            train_step(wrapper, model, optimizer, generator)
    return getattr(wrapper, "session", None) is None


def a_second_optimizer_later(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """The first two layers from the first step on, the others from the fourth."""
    first = torch.optim.SGD([p for layer in model.layers[:2] for p in layer.parameters()], lr=0.1)
    second = torch.optim.Adam([p for layer in model.layers[2:] for p in layer.parameters()], lr=0.01)
    for step in range(8):
        train_step(wrapper, model, first, generator)
        if step > 3:
            second.step()
            second.zero_grad()
    session = getattr(wrapper, "session", None)
    return session is not None and [type(one).__name__ for one in session.optimizers]


def a_part_frozen_between_forward_and_backward(wrapper: Any, model: Any, generator: torch.Generator) -> None:
    """Its gradients are zeros, not None, since torch's class was not asked to find unused parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(8):
        x, y = model.batch(generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapper(x), y)
        model.layers[step % 3].requires_grad_(step < 3)
        loss.backward()
        model.layers[step % 3].requires_grad_(True)
        optimizer.step()


def an_optimizer_of_each_phase(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    for optimizer in (momentum(model), adam(model)):
        for _ in range(5):
            train_step(wrapper, model, optimizer, generator)
    session = getattr(wrapper, "session", None)
    return session is not None and [type(one).__name__ for one in session.optimizers]


def validated_with_the_module_alone_back_in_training(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """As Lightning's trainer does it, before the first step."""
    optimizer = momentum(model)
    wrapper.eval()
    with torch.no_grad():
        wrapper(model.batch(generator)[0])
    model.train()
    for _ in range(5):
        train_step(wrapper, model, optimizer, generator)
    return getattr(wrapper, "session", None) is not None


def trained_in_evaluation_mode(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    optimizer = momentum(model)
    wrapper.eval()
    for _ in range(25):
        train_step(wrapper, model, optimizer, generator)
    return getattr(wrapper, "session", None) is None


def trained_on_after_close(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    optimizer = momentum(model)
    for step in range(8):
        if step == 4 and getattr(wrapper, "session", None) is not None:
            wrapper.session.close()
        train_step(wrapper, model, optimizer, generator)
    return getattr(wrapper, "session", None) is None


def converted_after_it_was_wrapped(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """Torch's class sums no more."""
    model.double()
    optimizer = momentum(model)
    for _ in range(6):
        train_step(lambda x: wrapper(x.double()), model, optimizer, generator)
    return getattr(wrapper, "session", None) is None


def a_gradient_of_inputs_taken_before_a_static_graph_is_known(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """Torch's class takes that pass for the first iteration, and sums no other right."""
    wrapper._set_static_graph()
    x, _ = model.batch(generator)
    torch.autograd.grad(wrapper(x.requires_grad_()).sum(), x)
    optimizer = momentum(model)
    for _ in range(6):
        train_step(wrapper, model, optimizer, generator)
    return getattr(wrapper, "session", None) is None


def buckets_as_gradients(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """Gradients are never set to None, so that torch's buckets stay in `.grad`."""
    optimizer = momentum(model)
    for _ in range(8):
        x, y = model.batch(generator)
        F.cross_entropy(wrapper(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return None


def synchronized_by_attribute(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """Accumulation as trainers do it who set the attribute themselves."""
    optimizer = momentum(model)
    for step in range(12):
        wrapper.require_backward_grad_sync = step % 3 == 2
        x, y = model.batch(generator)
        F.cross_entropy(wrapper(x), y).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return None


def sums_asked_of_the_reducer(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """Every forward pass under `no_sync()`; trainers then ask for the sum of each second backward pass."""
    optimizer = momentum(model)
    for step in range(16):
        x, y = model.batch(generator)
        with wrapper.no_sync():
            loss = F.cross_entropy(wrapper(x), y)
        if step % 2:
            wrapper.reducer._rebuild_buckets()
            wrapper.reducer.prepare_for_backward([])
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return None


def copies_in_between(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    """A deep copy, and one through a file, are torch's; they train by themselves afterwards."""
    optimizer = momentum(model)
    copies = []
    for step in range(8):
        if step == 5:
            file = io.BytesIO()
            torch.save(wrapper, file)
            file.seek(0)
            copies = [copy.deepcopy(wrapper), torch.load(file, weights_only=False)]
        train_step(wrapper, model, optimizer, generator)
    assert all(torch.equal(a, b) for a, b in zip(*(copied.parameters() for copied in copies), strict=True))
    for copied in copies:
        assert getattr(copied, "session", None) is None
        train_step(copied, copied.module, momentum(copied.module), generator)
    return None


# torch reads a hook's annotations, which are text in this file
def _doubles(_, bucket):  # type: ignore[no-untyped-def]
    """A hook that does something of its own: the sum in place of the mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _hooked(register: Callable[[Any, Any], object], after: int = 0) -> Loop:
    """`register` is given the wrapper and the optimizer at step `after`."""

    def loop(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
        optimizer = momentum(model)
        for step in range(8):
            if step == after:
                register(wrapper, optimizer)
            train_step(wrapper, model, optimizer, generator)
        return getattr(wrapper, "session", None) is None

    return loop


def _ends_passes_itself(wrapper: Any, optimizer: Any) -> None:
    wrapper.require_manual_backward_finalization = True
    optimizer.register_step_pre_hook(lambda *_: wrapper.finalize_backward())


def _replaced(replacing: range) -> Loop:
    """In the steps of `replacing` the pass gets a weight made of a parameter, which is not in the model meanwhile."""

    def loop(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
        optimizer = momentum(model)
        for step in range(8):
            optimizer.zero_grad()
            smaller = {"module.layers.0.weight": model.layers[0].weight * 0.99} if step in replacing else {}
            torch.func.functional_call(wrapper, smaller, (model.batch(generator)[0],)).square().mean().backward()
            optimizer.step()
        return getattr(wrapper, "session", None) is None

    return loop


def asked_whether_a_pass_has_ended(wrapper: Any, model: Any, generator: torch.Generator) -> Any:
    optimizer = momentum(model)
    for _ in range(5):
        train_step(wrapper, model, optimizer, generator)
        wrapper._check_reducer_finalized()
        wrapper._set_ddp_runtime_logging_sample_rate(10)
    return None


LOOPS = {
    each.__name__: each
    for each in (
        asked_whether_a_pass_has_ended,
        joins,
        joins_as_one_of_several,
        a_second_optimizer_later,
        an_optimizer_of_each_phase,
        a_part_frozen_between_forward_and_backward,
        validated_with_the_module_alone_back_in_training,
        trained_in_evaluation_mode,
        trained_on_after_close,
        converted_after_it_was_wrapped,
        a_gradient_of_inputs_taken_before_a_static_graph_is_known,
        buckets_as_gradients,
        synchronized_by_attribute,
        sums_asked_of_the_reducer,
        copies_in_between,
    )
} | {
    "parameters_replaced_in_each_call": _replaced(range(8)),
    "parameters_replaced_in_one_call": _replaced(range(1, 2)),  # gradlane would attach in this one
    "a_hook_of_the_scripts": _hooked(lambda wrapper, _: wrapper.register_comm_hook(None, _doubles)),
    "a_hook_after_some_steps": _hooked(lambda wrapper, _: wrapper.register_comm_hook(None, _doubles), after=4),
    "a_hook_that_compresses": _hooked(lambda wrapper, _: wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    "a_built_in_hook": _hooked(lambda wrapper, _: wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)),
    "a_built_in_hook_after_some_steps": _hooked(
        lambda wrapper, _: wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS), after=4
    ),
    "a_hook_for_buffers": _hooked(lambda wrapper, _: wrapper._register_buffer_comm_hook(None, lambda *_: None)),
    "another_process_group": _hooked(lambda wrapper, _: wrapper._update_process_group(dist.new_group()), after=4),
    "a_hook_that_changes_nothing": _hooked(lambda wrapper, _: wrapper.register_comm_hook(None, default_hooks.allreduce_hook)),
}
if RELEASE >= (2, 15):
    LOOPS |= {
        "passes_that_the_script_ends": _hooked(_ends_passes_itself),
        "passes_that_the_script_ends_after_some_steps": _hooked(_ends_passes_itself, after=4),
    }


def a_hook_that_wire_dtype_does(rank: int, world: int) -> tuple[bool, bool]:
    """Whether training is as with torch's class and a hook that compresses, but for the rounding of halves, where gradlane was
    asked to; whether gradlane sums.
    """
    register = _hooked(lambda wrapper, _: wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook))
    reference, _ = _trained(rank, TorchDDP, register)
    options = {**OPTIONS, "wire_dtype": "float16"}
    found, is_torchs = _trained(rank, lambda model: gradlane.DistributedDataParallel(model, options=options), register)
    return all(torch.allclose(found[name], value, atol=1e-3) for name, value in reference.items()), not is_torchs


def a_part_frozen_when_wrapped(rank: int, world: int, to_torch: bool) -> tuple[list[str], list[str]]:
    """What differs, and what was logged, where a part is frozen for the first five steps, as Lightning's `BackboneFinetuning`
    does it: torch's class never sums its gradients. The head is frozen while the script gives the model to torch, if it does.
    """

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, generator = Mlp(), torch.Generator().manual_seed(1000 + rank)
        model.layers[0].requires_grad_(False)
        wrapper, optimizer = wrap(model, find_unused_parameters=True), momentum(model)
        for step in range(12):
            model.layers[0].requires_grad_(step >= 5)
            model.layers[-1].requires_grad_(step not in (7, 8, 9))
            if step == 8 and to_torch:
                wrapper.register_comm_hook(None, _doubles)
            train_step(wrapper, model, optimizer, generator)
        close(wrapper)
        return bits(model, None)

    reference = train(TorchDDP)
    with log_lines() as lines, slow_network():
        found = train(_wrap)
    return differences(reference, found), [line for line in lines if "frozen" in line]


class Remembering(Mlp):
    """Gives probabilities, which autograd needs as they are, and keeps them."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.last = torch.sigmoid(super().forward(x))
        return {"probabilities": self.last}


def outputs_that_are_changed(rank: int, world: int) -> list[str]:
    """What differs where the script changes the output in place, and torch's class gives clones of it."""

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, generator, kept = Remembering(), torch.Generator().manual_seed(1000 + rank), []
        wrapper, optimizer = wrap(model, find_unused_parameters=True), momentum(model)
        for _ in range(8):
            train_step(lambda x: wrapper(x)["probabilities"].mul_(3.0), model, optimizer, generator)
            kept.append(model.last.detach().clone())
        close(wrapper)
        return bits(model, None) | {f"kept {step}": values for step, values in enumerate(kept)}

    reference = train(TorchDDP)
    with slow_network():
        return differences(reference, train(_wrap))


class _Handed(torch.autograd.Function):
    """Hands a tensor on. Autograd gives such a function zeros where there is no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 6)
        self.third = nn.Linear(20, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        x = torch.tanh(self.trunk(x))
        return self.third(x), {"other": self.second(_Handed.apply(self.first(x))), "rows": len(x)}  # type: ignore[no-untyped-call]


def outputs_that_the_loss_leaves_out(rank: int, world: int) -> list[str]:
    """What differs where one output is not used, behind a function that makes zeros of its missing gradient."""

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, generator, steps = TwoOutputs(), torch.Generator().manual_seed(1000 + rank), iter(range(8))
        model.batch = Mlp.batch  # type: ignore[assignment]
        wrapper, optimizer = wrap(model, find_unused_parameters=True), adam(model)

        def call(x: torch.Tensor) -> torch.Tensor:
            output, others = wrapper(x)
            return others["other"] if next(steps) % 3 == 0 else output

        for _ in range(8):
            train_step(call, model, optimizer, generator)
        close(wrapper)
        return bits(model, optimizer)

    reference = train(TorchDDP)
    with slow_network():
        return differences(reference, train(_wrap))


def compiled_past_the_wrapper(rank: int, world: int) -> tuple[list[str], int]:
    """What differs where the module inside is compiled or exported as one graph between steps, which reads its parameters
    first; and how many updates were deferred.
    """
    torch._dynamo.reset()

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, generator, found = Mlp(), torch.Generator().manual_seed(1000 + rank), {}
        wrapper, optimizer = wrap(model), adam(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for step in range(10):
            train_step(wrapper, model, optimizer, generator)
            x, _ = model.batch(generator)
            with torch.no_grad():
                if step % 3 == 0:
                    found[f"exported {step}"] = torch.export.export(model, (x,), strict=True).module()(x)
                elif step % 3 == 1:
                    found[f"compiled {step}"] = compiled(x)
        close(wrapper)
        return bits(model, optimizer) | found

    reference = train(TorchDDP)
    with slow_network(), counting_deferred_updates() as deferred:
        return differences(reference, train(_wrap)), sum(deferred)


class Shifted(nn.Module):
    """A layer and a buffer, which each rank makes with other values."""

    def __init__(self, layer: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("shift", torch.rand(6, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = self.layer(x) + self.shift
        return shifted


def buffers_that_appear_and_move(rank: int, world: int, from_the_start: bool) -> tuple[list[str], bool]:
    """What differs from torch's class, and whether gradlane sums in the end. Torch's class looks for buffers at each forward
    pass if the model had some when it was wrapped.
    """

    def trained(wrap: Callable[..., Any]) -> tuple[dict[str, torch.Tensor], bool]:
        torch.manual_seed(7)
        model: Any = Mlp()
        if from_the_start:
            model.register_buffer("steps", torch.zeros(1))
        wrapper, optimizer, generator = wrap(model), momentum(model), torch.Generator().manual_seed(1000 + rank)
        try:
            for step in range(12):
                if step in (4, 8):
                    model.layers[3] = Shifted(model.layers[3], generator)
                train_step(wrapper, model, optimizer, generator)
            return bits(model, optimizer), getattr(wrapper, "session", None) is not None
        finally:
            close(wrapper)

    reference, _ = trained(TorchDDP)
    with slow_network():
        found, sums = trained(_wrap)
    return differences(reference, found), sums


def the_module_called_by_itself(rank: int, world: int) -> tuple[list[str], list[float], list[float]]:
    """What differs, and what was seen under torch's class and under gradlane's, where the script calls the module without its
    wrapper, in training mode and not, on one rank and on both: no rank gets rank 0's buffers then.
    """

    def train(wrap: Callable[..., Any]) -> tuple[Any, list[float]]:
        torch.manual_seed(7)
        model, generator = Convolutions(), torch.Generator().manual_seed(1000 + rank)
        wrapper, optimizer, seen = wrap(model), momentum(model), []
        for step in range(9):
            train_step(wrapper, model, optimizer, generator)
            model.train(step % 3 > 0)
            if step % 2 or rank:
                with torch.no_grad():
                    seen.append(model(model.batch(generator)[0]).sum().item())
            model.train()
            seen.append(model.features[1].running_mean.sum().item())
        found = bits(model, None)
        close(wrapper)
        return found, seen

    reference, torchs = train(TorchDDP)
    with slow_network():
        found, ours = train(_wrap)
    return differences(reference, found), torchs, ours


def past_the_wrapper(rank: int, world: int, verify: bool) -> tuple[list[str], list[str]]:
    """What differs from torch's class, and what is logged, where a graph is used twice and the module is called by itself."""
    options = {**OPTIONS, "verify": gradlane.VerifyOptions(first=0, every=1) if verify else False}

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, generator = Convolutions(), torch.Generator().manual_seed(1000 + rank)
        wrapper, optimizer = wrap(model), adam(model)
        for step in range(16):
            optimizer.zero_grad()
            x, y = model.batch(generator)
            loss = F.cross_entropy(wrapper(x), y)
            loss.backward(retain_graph=True)
            if step % 4 == 1:
                loss.backward()
            elif step % 4 == 2:
                F.cross_entropy(model(x * 2), y).backward()
            elif step % 4 == 3:  # as Lightning does in each `manual_backward`
                again = F.cross_entropy(model(x * 2), y)
                wrapper.reducer.prepare_for_backward([])
                again.backward()
            optimizer.step()
        close(wrapper)
        return bits(model, optimizer)

    reference = train(TorchDDP)
    with log_lines() as lines, slow_network():
        found = train(lambda model: gradlane.DistributedDataParallel(model, options=options))
    told = ("drift apart", "rank 0's buffers", "verified")
    return differences(reference, found), [line for line in lines if any(words in line for words in told)]


def two_models(rank: int, world: int) -> tuple[list[str], list[bool]]:
    """A generator and a discriminator, each wrapped; what differs from torch's, and which are scheduled."""

    def train(wrap: Callable[..., Any]) -> tuple[dict[str, torch.Tensor], list[bool]]:
        torch.manual_seed(7)
        makes, judges = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 12)), Mlp()
        maker, judge = wrap(makes), wrap(judges, broadcast_buffers=False)
        optimizers = adam(makes), momentum(judges)
        generator = torch.Generator().manual_seed(1000 + rank)
        for _ in range(8):
            real, labels = judges.batch(generator)
            made = maker(torch.randn(8, 4, generator=generator))
            optimizers[1].zero_grad()
            (F.cross_entropy(judge(real), labels) + judge(made.detach()).square().mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.cross_entropy(judges(made), labels).backward()
            optimizers[0].step()
        scheduled = [getattr(wrapper, "session", None) is not None for wrapper in (maker, judge)]
        found = {
            f"{index}/{name}": value for index, one in enumerate((makes, judges)) for name, value in bits(one, None).items()
        }
        for wrapper in (maker, judge):
            close(wrapper)
        return found, scheduled

    reference, _ = train(lambda model, **kwargs: TorchDDP(model, find_unused_parameters=True, **kwargs))
    found, scheduled = train(lambda model, **kwargs: _wrap(model, find_unused_parameters=True, **kwargs))
    return differences(reference, found), scheduled


def checkpointed_aside(rank: int, world: int, hides: bool) -> tuple[list[str], list[str]]:
    """What differs from torch's class, and what is logged, where a backward pass begins inside of a reentrant checkpoint: the
    wrapper's output does not show the loss (`hides`), or shows one that the backward pass comes to later.
    """

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, generator = (HiddenLoss() if hides else CheckpointedAside()), torch.Generator().manual_seed(1000 + rank)
        wrapper, optimizer = wrap(model), momentum(model)
        for _ in range(10):
            optimizer.zero_grad()
            x, y = model.batch(generator)
            output = wrapper(x)
            (F.cross_entropy(output() if hides else output, y) + model.aside).backward()
            optimizer.step()
        found = bits(model, optimizer)
        assert wrap is TorchDDP or wrapper.session is not None
        close(wrapper)
        return found

    return _beside_torchs(train, "drift apart")


def buffers_left_alone_later(rank: int, world: int, first: bool) -> tuple[list[str], list[str]]:
    """What differs from torch's class, and what is logged, where `broadcast_buffers` is changed after the sixth step."""

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, generator = Convolutions(), torch.Generator().manual_seed(1000 + rank)
        wrapper, optimizer = wrap(model), momentum(model)
        wrapper.broadcast_buffers = first
        for step in range(12):
            if step == 6:
                wrapper.broadcast_buffers = not first
            train_step(wrapper, model, optimizer, generator)
        found = bits(model, optimizer)
        close(wrapper)
        return found

    return _beside_torchs(train, "broadcast_buffers")


def evaluated_with_own_buffers(rank: int, world: int) -> tuple[list[str], tuple[list[float], list[float]]]:
    """What differs, and what ranks evaluate between steps with `broadcast_buffers` off, under both classes."""

    def train(wrap: Callable[..., Any]) -> tuple[Any, list[float]]:
        torch.manual_seed(7)
        model, generator = Convolutions(), torch.Generator().manual_seed(1000 + rank)
        wrapper, optimizer, seen = wrap(model), momentum(model), []
        for _ in range(9):
            train_step(wrapper, model, optimizer, generator)
            wrapper.broadcast_buffers = False
            wrapper.eval()
            with torch.no_grad():
                seen.append(wrapper(model.batch(generator)[0]).sum().item())
            wrapper.train()
            wrapper.broadcast_buffers = True
        found = bits(model, optimizer)
        close(wrapper)
        return found, seen

    reference, torchs = train(TorchDDP)
    with slow_network():
        found, ours = train(_wrap)
    return differences(reference, found), (torchs, ours)


def calls_in_backward_passes(rank: int, world: int, which: str, verify: bool) -> tuple[list[str], list[str]]:
    """What differs from torch's class, and what is logged, where the wrapper is called inside of a backward pass, its own or
    another's, which torch's class takes for any other call.
    """

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, stem, generator = Convolutions(), nn.Conv2d(1, 1, 1), torch.Generator().manual_seed(1000 + rank)
        wrapper, optimizer, seen = wrap(model), momentum(model), []

        @torch.enable_grad()
        def step_inside(_: Any) -> None:
            train_step(wrapper, model, optimizer, generator)

        kept: list[torch.Tensor] = []

        @torch.enable_grad()
        def call_inside(_: Any) -> None:
            kept.append(wrapper(model.batch(generator)[0]))

        def evaluate(_: Any) -> None:
            wrapper.eval()
            with torch.no_grad():
                seen.append(wrapper(model.batch(generator)[0]).sum())
            wrapper.train()

        for step in range(10):
            x, y = model.batch(generator)
            optimizer.zero_grad()
            if which == "a step inside of another":
                outer = stem(x).square().mean()
                outer.register_hook(step_inside)
                outer.backward()
                continue
            if which == "a forward pass inside of another":
                outer = stem(x).square().mean()
                outer.register_hook(call_inside)
                outer.backward()
                output = kept.pop()
            elif which == "an evaluation inside of its own":
                output = wrapper(x)
                output.register_hook(evaluate)
            else:
                reentrant = which == "checkpointed reentrantly" and step % 3 < 2
                output = checkpoint(wrapper, stem(x), use_reentrant=reentrant)
            F.cross_entropy(output, y).backward()
            optimizer.step()
        found = {**bits(model, optimizer), "seen": torch.tensor([float(value) for value in seen])}
        assert wrap is TorchDDP or wrapper.session is not None
        close(wrapper)
        return found

    options = {**OPTIONS, "verify": gradlane.VerifyOptions(first=0, every=1) if verify else False}
    return _beside_torchs(train, "drift apart", lambda model: gradlane.DistributedDataParallel(model, options=options))


def buffers_changed_by_a_hook(rank: int, world: int, when: str) -> list[str]:
    """What differs from torch's class where a pre-hook of the module, which has rank 0's buffers, changes them."""

    def count(module: Any, _: Any) -> None:
        module.features[1].running_mean.add_(0.1 * (rank + 1))

    def train(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(7)
        model, generator = Convolutions(), torch.Generator().manual_seed(1000 + rank)
        if when == "before":
            model.register_forward_pre_hook(count)
        wrapper, optimizer = wrap(model), momentum(model)
        for step in range(9):
            if step == 5 and when == "later, first of all":
                model.register_forward_pre_hook(count, prepend=True)
            train_step(wrapper, model, optimizer, generator)
        found = bits(model, optimizer)
        assert wrap is TorchDDP or wrapper.session is not None
        close(wrapper)
        return found

    reference = train(TorchDDP)
    with slow_network():
        return differences(reference, train(_wrap))


class HiddenLoss(CheckpointedAside):
    """Returns a function that has the output."""

    def forward(self, x: torch.Tensor) -> Any:
        output = super().forward(x)
        return lambda: output


def refusals(rank: int, world: int) -> list[str]:
    """What the drop-in refuses, in its words."""
    model = Mlp()
    said = []
    for act in (lambda: _wrap(model),):
        with gradlane.attach(model, momentum(model), network=GIVEN, timeout=20):
            try:
                act()
            except UnsupportedError as error:
                said.append(str(error))
    return said


def stays_torchs(rank: int, world: int) -> tuple[bool, list[str]]:
    """A model that gradlane refuses goes on as torch's; one line says why."""
    model = nn.Sequential(nn.Embedding(10, 12, sparse=True), nn.Flatten(), nn.Linear(24, 2))
    wrapper = _wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with log_lines() as lines:
        for step in range(4):
            optimizer.zero_grad()
            wrapper(torch.tensor([[step, 9]])).sum().backward()
            optimizer.step()
    return wrapper.session is None, lines


def summed_by_python(rank: int, world: int) -> tuple[bool, list[str]]:
    """As for compiled autograd: torch's class sums in Python, where it can be traced."""
    model = Mlp()
    with log_lines() as lines, torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        wrapper = _wrap(model)
        optimizer, generator = momentum(model), torch.Generator().manual_seed(rank)
        for _ in range(4):
            train_step(wrapper, model, optimizer, generator)
    return wrapper.session is None, lines


def in_a_fork(rank: int, world: int) -> tuple[bool, int, list[str]]:
    """Whether gradlane goes on, how a child ends that calls its copy of the wrapper, and what is logged, in the child too."""
    model = Mlp()
    wrapper = _wrap(model)
    optimizer, generator = momentum(model), torch.Generator().manual_seed(rank)
    told, tells = os.pipe()
    for _ in range(4):
        train_step(wrapper, model, optimizer, generator)
    with log_lines() as lines:
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                wrapper(model.batch(generator)[0])
            os.write(tells, "\n".join(lines).encode())
            os._exit(7)
        os.close(tells)
        _, status = os.waitpid(child, 0)
        with open(told, "rb") as said:
            lines += said.read().decode().splitlines()
        train_step(wrapper, model, optimizer, generator)
    summed = wrapper.session is not None
    close(wrapper)
    return summed, os.waitstatus_to_exitcode(status), list(lines)


def one_rank_tries_again(rank: int, world: int, which: int, tries: int) -> tuple[list[Any], dict[str, Any]]:
    """Rank `which` catches errors of some forward passes, and calls the model again each time.

    Returns:
        The running means at the begin of each later pass, and the parameters at the end.
    """
    torch.manual_seed(7)
    model = Raising()
    wrapper = _wrap(model)
    optimizer, generator = momentum(model), torch.Generator().manual_seed(1000 + rank)
    began: list[Any] = []
    for step in range(14):
        for _ in range(tries if rank == which and step in (7, 9) else 0):
            model.raises = True
            with contextlib.suppress(MemoryError):
                wrapper(model.batch(generator)[0])
            model.raises = False
        if step == 10:
            model.features[1].register_forward_pre_hook(lambda module, _: began.append(module.running_mean.tolist()))
        train_step(wrapper, model, optimizer, generator)
    close(wrapper)
    return began, {name: param.tolist() for name, param in model.named_parameters()}


def readers(rank: int, world: int) -> dict[str, list[str]]:
    """What is logged of loops that read gradients before each step, and parameters after it; no sum is there before it is
    awaited.
    """

    def clips(model: Any, step: Callable[[], Any]) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step()

    def averages(model: Any, step: Callable[[], Any]) -> None:
        step()
        for param in model.parameters():
            float(param.detach().sum())

    found = {}
    for loop in (clips, averages):
        model = Mlp()
        wrapper, optimizer = _wrap(model), momentum(model)
        generator = torch.Generator().manual_seed(rank)
        with network_until_awaited(), log_lines() as lines:
            for _ in range(10):
                train_step(wrapper, model, optimizer, generator, functools.partial(loop, model, optimizer.step))
            close(wrapper)
        found[loop.__name__] = lines
    return found


def looks_like_torchs(rank: int, world: int) -> list[bool]:
    """Before and after it is scheduled: its type, its names, its module."""
    model = Mlp()
    wrapper, optimizer = _wrap(model), momentum(model)
    generator = torch.Generator().manual_seed(rank)
    found = []
    with slow_network(), counting_deferred_updates() as deferred:
        for _ in range(6):
            found += [isinstance(wrapper, TorchDDP), wrapper.module is model]
            found.append(isinstance(wrapper._get_ddp_logging_data(), dict))
            found.append(list(wrapper.state_dict()) == [f"module.{name}" for name in model.state_dict()])
            train_step(wrapper, model, optimizer, generator)
        found += [wrapper.session is not None, sum(deferred) > 0]
        close(wrapper)
    return found


def dropped_wrappers_leave_nothing(rank: int, world: int) -> list[bool]:
    """Models one after another, as in cross-validation: whether each one's session is closed once the next is wrapped."""
    sessions = []
    for _ in range(3):
        model = Mlp()
        wrapper, optimizer = _wrap(model), momentum(model)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            train_step(wrapper, model, optimizer, generator)
        sessions.append(wrapper.session)
        del wrapper
    closed = [session.closed for session in sessions]
    sessions[-1].close()
    return closed


def one_rank_trains_on_without_its_wrapper(rank: int, world: int) -> tuple[list[str], bool]:
    """Rank 1 alone trains the bare module when the wrapper is gone: what differs from torch's then."""

    def train(wrap: Callable[..., Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        model = Scaled()
        wrapper, optimizer = wrap(model), momentum(model)
        generator = torch.Generator().manual_seed(1000 + rank)
        for _ in range(6):
            train_step(wrapper, model, optimizer, generator)
        scheduled.append(getattr(wrapper, "session", None))
        del wrapper
        gc.collect()
        for _ in range(3 if rank == 1 else 0):
            train_step(model, model, optimizer, generator)
        return bits(model, None)

    scheduled: list[Any] = []
    reference, found = train(TorchDDP), train(_wrap)
    torch.distributed.barrier()
    scheduled[1].close()
    return differences(reference, found), scheduled[1] is not None
