"""What ranks run: loops that read norms of gradients and scale them before each step, under `owners` beside DDP.

Sums are held back until somebody waits for them (`held_network`), so that what can be deferred is.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import gradlane
from gradlane.live.backends import norms as told_norms
from gradlane.live.backends.all_reduce_sums import SumsInStream
from gradlane.live.backends.norms import NormsExchange
from gradlane.live.backends.staging import Staging
from tests.live.cases import bits_of, differences
from tests.live.loops import GIVEN, Mlp
from tests.live.networks import counting_deferred_updates
from tests.live.programs.held import held_network
from tests.live.streams import streams_on_the_host

STEPS = 9
Params = Sequence[nn.Parameter]
Clip = Callable[[Params, int, int], Any]
"""Called between `backward()` and `step()` with the parameters, the step and the rank; returns what it has seen."""


def _gradients(params: Params) -> list[Any]:
    return [param.grad for param in params]


def _by_torch(params: Params, step: int, rank: int) -> Any:
    return clip_grad_norm_(params, 0.1, foreach=(None, True, False)[step % 3])


def _in_two_calls(params: Params, step: int, rank: int) -> Any:
    norm = get_total_norm(_gradients(params), error_if_nonfinite=True)
    clip_grads_with_norm_(params, 0.1, norm)
    return norm


def _of_order(order: float) -> Clip:
    return lambda params, step, rank: clip_grad_norm_(params, 0.5, norm_type=order)


def _by_hand(params: Params, step: int, rank: int) -> Any:
    total = torch.stack([gradient.norm(2) for gradient in _gradients(params)]).norm(2)
    for gradient in _gradients(params):
        gradient.mul_(0.1) if step % 2 else gradient.div_(total)
    return total


def _in_some_steps(params: Params, step: int, rank: int) -> Any:
    return clip_grad_norm_(params, 0.1) if step % 3 == 1 else torch.zeros(())


def _on_one_rank(params: Params, step: int, rank: int) -> Any:
    if rank == 0:
        get_total_norm(_gradients(params))
    return torch.zeros(())


def _some_parameters(params: Params, step: int, rank: int) -> Any:
    return torch.stack([clip_grad_norm_(params[:3], 0.1), clip_grad_norm_(params[3:5], 0.05)])


def _twice(params: Params, step: int, rank: int) -> Any:
    return torch.stack([clip_grad_norm_(params, 0.2), clip_grad_norm_(params, 0.1)])


def _and_read(params: Params, step: int, rank: int) -> Any:
    clip_grad_norm_(params, 0.1)
    first, *others = _gradients(params)
    return torch.stack([first.sum(), *(gradient.abs().max() for gradient in others)])


def _by_a_factor_that_changes(params: Params, step: int, rank: int) -> Any:
    factor = torch.tensor(0.5)
    for gradient in _gradients(params):
        gradient.mul_(factor)
    factor.fill_(3.0)
    return factor


def _scale_alone(params: Params, step: int, rank: int) -> Any:
    for gradient in _gradients(params):
        gradient /= 2 + step
    return torch.zeros(())


def _by_value(params: Params, step: int, rank: int) -> Any:
    nn.utils.clip_grad_value_(params, 0.01)
    return torch.zeros(())


def _limited_in_other_forms(params: Params, step: int, rank: int) -> Any:
    gradients = _gradients(params)
    gradients[0].clamp_(-0.01, 0.02)
    gradients[1].clamp_(None, max=0.01) if step % 2 else gradients[1].clamp_(min=None, max=0.01)
    gradients[2].clip_(min=-0.03).clamp_max_(0.02)
    gradients[3].clamp_min_(-0.01).mul_(0.5).clamp_max_(max=0.004)
    torch._foreach_clamp_min_(gradients[4:], -0.01)
    return torch.zeros(())


def _limited_by_what_torch_refuses(params: Params, step: int, rank: int) -> Any:
    calls: list[Any] = [
        ((), {}),
        ((None,), {}),
        (("2",), {}),
        ((1j,), {}),
        ((1, 2, 3), {}),
        ((1,), {"min": 2}),
        ((), {"most": 1}),
    ]
    return _refused(params, "clamp_", calls)


def _without_nan(params: Params, step: int, rank: int) -> Any:
    for number, gradient in enumerate(_gradients(params)):
        if number % 3 == 0:
            torch.nan_to_num(gradient, nan=0, posinf=1e5, neginf=-1e5, out=gradient)
        elif number % 3 == 1:
            gradient.nan_to_num_(0.5, 2.0)
        else:
            torch.nan_to_num_(gradient, neginf=None)
    return torch.zeros(())


def _without_nan_elsewhere(params: Params, step: int, rank: int) -> Any:
    gradients = _gradients(params)
    first = torch.empty_like(params[0])
    torch.nan_to_num(gradients[0], out=first)
    others = [torch.nan_to_num(gradient).sum() for gradient in gradients[1:]]
    refused = []
    for gradient in gradients:
        for args, kwargs in (((0, 1, 2, 3), {}), ((0,), {"nan": 1}), ((), {"inf": 1}), ((1j,), {})):
            try:
                gradient.nan_to_num_(*args, **kwargs)
            except (RuntimeError, TypeError) as error:
                refused.append(type(error).__name__)
    return torch.stack([first.sum(), *others, torch.tensor(float(len(refused)), device=first.device)])


def _limited_by_tensors(params: Params, step: int, rank: int) -> Any:
    limit = torch.tensor(0.01, device=params[0].device)
    for gradient in _gradients(params):
        gradient.clamp_(max=limit)
    limit.fill_(3.0)
    return limit


def _limited_by_tensors_and_clipped(params: Params, step: int, rank: int) -> Any:
    return torch.stack([_limited_by_tensors(params, step, rank), clip_grad_norm_(params, 0.1)])


def _norm_of_what_was_scaled(params: Params, step: int, rank: int) -> Any:
    torch._foreach_mul_(_gradients(params), 0.25)
    return torch.stack(list(torch._foreach_norm(_gradients(params))))


def _given_twice(params: Params, step: int, rank: int) -> Any:
    gradients = _gradients(params)
    torch._foreach_mul_([*gradients, *gradients[:3]], 0.5)
    return torch.stack([*torch._foreach_norm([*gradients, gradients[0]]), gradients[1].sum()])


def _norms_that_are_kept(params: Params, step: int, rank: int) -> Any:
    kept = [gradient.norm() for gradient in _gradients(params)]
    kept[0].mul_(3)
    return torch.stack([*kept, _gradients(params)[0].norm()])


def _in_other_forms(params: Params, step: int, rank: int) -> Any:
    gradients, out = _gradients(params), torch.zeros((), device=params[0].device)
    torch.linalg.vector_norm(gradients[0], 2, out=out)
    named = torch.linalg.vector_norm(x=gradients[1], ord=2)
    several = torch._foreach_norm(self=gradients, ord=2)
    kinds = [type(torch._foreach_norm(gradients)) is tuple, torch._foreach_mul_(gradients, 0.5)[0] is gradients[0]]
    return torch.stack([out, named, *several, *(torch.tensor(kind, device=out.device) for kind in kinds)])


def _by_what_torch_refuses(params: Params, step: int, rank: int) -> Any:
    return _refused(params, "mul_", [((factor,), {}) for factor in (torch.tensor(1j), 10**400, "2")])


def _refused(params: Params, change: str, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    """How many of the calls torch refuses, and with how many kinds of errors."""
    refused = []
    for gradient in _gradients(params):
        for args, kwargs in calls:
            try:
                getattr(gradient, change)(*args, **kwargs)
            except (RuntimeError, OverflowError, TypeError, ValueError) as error:
                refused.append(type(error).__name__)
    return torch.tensor([len(refused), len(set(refused))])


WAYS: dict[str, tuple[Clip, int]] = {
    "by torch": (_by_torch, 2),
    "in two calls": (_in_two_calls, 2),
    "of order 1": (_of_order(1.0), 1),
    "of order infinity": (_of_order(float("inf")), 0),
    "of another order than the plan's": (_of_order(3.0), 2),
    "by hand": (_by_hand, 2),
    "in some steps": (_in_some_steps, 2),
    "on one rank": (_on_one_rank, 2),
    "some parameters": (_some_parameters, 2),
    "twice": (_twice, 2),
    "and read": (_and_read, 2),
    "by a factor that changes": (_by_a_factor_that_changes, 2),
    "scaled alone": (_scale_alone, 2),
    "by value": (_by_value, 2),
    "limited in other forms": (_limited_in_other_forms, 2),
    "limited by what torch refuses": (_limited_by_what_torch_refuses, 2),
    "limited by tensors": (_limited_by_tensors, 2),
    "limited by tensors and clipped": (_limited_by_tensors_and_clipped, 2),
    "without NaN": (_without_nan, 2),
    "without NaN elsewhere": (_without_nan_elsewhere, 2),
    "the norm of what was scaled": (_norm_of_what_was_scaled, 2),
    "given twice": (_given_twice, 2),
    "norms that are kept": (_norms_that_are_kept, 2),
    "in other forms": (_in_other_forms, 2),
    "by what torch refuses": (_by_what_torch_refuses, 2),
}
"""What is done to gradients, and the order of norms that owners tell."""


class _Scaled:
    """A script with a GradScaler. Its scale changes every third step, and is a power of two if nothing else is said.

    Args:
        order: of the norms that owners tell.
        clip: what is done after `unscale_`; None: `unscale_` is not called, but by `GradScaler.step`.
        scale: the first one, by rank.
        before: what is done before all that.
        infinite: in this step the loss of rank 1 is infinite.
        of: only by the gradient of this parameter.
        new_scale: sets the scale of each step.
        skips: whether a step has no use for the scaler.
        leaves_out: whether the script does all but to step.
        fused: the optimizer divides gradients itself.
    """

    def __init__(
        self,
        clip: Clip | None = None,
        order: int = 2,
        scale: Callable[[int], float] = lambda rank: 2.0**10,
        before: Clip | None = None,
        infinite: int = -1,
        of: int | None = None,
        new_scale: Callable[[int], float] | None = None,
        skips: Callable[[int], bool] = lambda step: False,
        leaves_out: Callable[[int], bool] = lambda step: False,
        fused: bool = False,
    ) -> None:
        self._leaves_out, self.fused = leaves_out, fused
        self.clip, self.order, self._scale, self._before = clip, order, scale, before
        self._infinite, self._of, self._new_scale, self._skips = infinite, of, new_scale, skips

    def train(self, model: nn.Module, call: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + rank)
        params = list(model.parameters())
        scaler = torch.amp.GradScaler(params[0].device.type, init_scale=self._scale(rank), growth_interval=3)
        seen = {}
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = call(torch.randn(8, 12, generator=generator).to(params[0])).square().mean()
            if self._skips(step):
                loss.backward()
                seen[f"seen in step {step}"] = clip_grad_norm_(params, 0.1)
                optimizer.step()
                continue
            if (step, rank) == (self._infinite, 1):
                loss = loss * float("inf") if self._of is None else loss + params[self._of].sum() * float("inf")
            scaler.scale(loss).backward()
            if self._before is not None:
                seen[f"seen before step {step}"] = self._before(params, step, rank).clone()
            if self.clip is not None:
                scaler.unscale_(optimizer)
                seen[f"seen in step {step}"] = self.clip(params, step, rank).clone()
            if self._leaves_out(step):
                scaler.update()
                continue
            scaler.step(optimizer)
            found = scaler._found_inf_per_device(optimizer)
            seen[f"infinite in step {step}"] = torch.stack([value.cpu() for value in found.values()])
            scaler.update(None if self._new_scale is None else self._new_scale(step))
            seen[f"scale of step {step}"] = torch.tensor(scaler.get_scale())
        return {**bits_of(model, optimizer), **seen}


def _all_norms(params: Params, step: int, rank: int) -> Any:
    return torch.stack(list(torch._foreach_norm(_gradients(params))))


def _scaled_once_more(params: Params, step: int, rank: int) -> Any:
    torch._foreach_mul_(_gradients(params), 0.5)
    return clip_grad_norm_(params, 0.1)


SCALED = {
    "unscaled by the step": _Scaled(),
    "unscaled and clipped": _Scaled(_by_torch),
    "unscaled by no power of two": _Scaled(_all_norms, scale=lambda rank: 1000.0),
    "unscaled, of order infinity": _Scaled(_of_order(float("inf")), order=0),
    "unscaled, of another order than the plan's": _Scaled(_of_order(3.0)),
    "unscaled and limited": _Scaled(_by_value),
    "unscaled and scaled once more": _Scaled(_scaled_once_more),
    "unscaled, and norms before": _Scaled(_by_torch, before=_all_norms),
    "unscaled after clipping": _Scaled(before=_by_torch),
    "unscaled, infinite in one step": _Scaled(_by_torch, infinite=4),
    "unscaled by the step, infinite in one step": _Scaled(infinite=5),
    "unscaled, infinite in one step and parameter": _Scaled(_by_torch, infinite=5, of=0),
    "unscaled by another scale on each rank": _Scaled(_all_norms, scale=lambda rank: 2.0 ** (8 + rank)),
    "unscaled by another scale in each step": _Scaled(_by_torch, new_scale=lambda step: 64.0 + step),
    "unscaled by one": _Scaled(_by_torch, scale=lambda rank: 1.0, new_scale=lambda step: 1.0),
    "unscaled and left out": _Scaled(_by_torch, leaves_out=lambda step: step % 4 == 1),
    "unscaled by a fused optimizer": _Scaled(infinite=5, fused=True),
    "unscaled in some steps": _Scaled(_by_torch, skips=lambda step: step % 4 == 2),
}
"""Scripts with a GradScaler, which divides gradients by its scale and asks whether they are finite."""


def _order_of(way: str) -> int:
    return SCALED[way].order if way in SCALED else WAYS[way][1]


def _trained(
    model: nn.Module, call: nn.Module, optimizer: torch.optim.Optimizer, way: str | Clip, rank: int
) -> dict[str, torch.Tensor]:
    if isinstance(way, str) and way in SCALED:
        return SCALED[way].train(model, call, optimizer, rank)
    clip = WAYS[way][0] if isinstance(way, str) else way
    generator = torch.Generator().manual_seed(1000 + rank)
    params = list(model.parameters())
    seen = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        call(torch.randn(8, 12, generator=generator).to(params[0])).square().mean().backward()
        seen[f"seen in step {step}"] = clip(params, step, rank).clone()
        optimizer.step()
    return {**bits_of(model, optimizer), **seen}


def _attach(world: int, model: nn.Module, optimizer: torch.optim.Optimizer, policy: str = "owners", **options: Any) -> Any:
    """A session of these tests; `options` are those of `gradlane.attach` or knobs of `policy`."""
    owners = {"least_bytes": 1024, "most_bytes": 30_000, "order": 2} if policy == "owners" else {}
    knobs = {name: options.pop(name, value) for name, value in owners.items()}
    network = gradlane.Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second)
    options = {"network": network, "profile_iterations": 1, "timeout": 20, "backend": "all-reduce"} | options
    return gradlane.attach(model, optimizer, gradlane.policies.get(policy, **knobs), **options)


def small_batches() -> Any:
    """Owners compute norms in batches as small as these models: some while sums are on their way, the others in the end."""
    return patch.object(told_norms, "_BATCH_BYTES", 4096)


def beside_ddp(
    rank: int,
    world: int,
    way: str,
    policy: str = "owners",
    verify: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    **options: Any,
) -> tuple[list[str], int]:
    """Names that differ from DDP's, and how many updates were deferred."""
    kind = getattr(torch, dtype)
    fused = way in SCALED and SCALED[way].fused
    knobs = {"order": _order_of(way)} if policy == "owners" else {}
    torch.manual_seed(7)
    model = Mlp(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    reference = _trained(model, DistributedDataParallel(model), optimizer, way, rank)
    torch.manual_seed(7 + rank)  # attach must make ranks equal to rank 0
    model = Mlp(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    options |= {"verify": verify, **knobs}
    held, deferring = held_network(lambda message: True), counting_deferred_updates()
    with small_batches(), held, deferring as deferred, _attach(world, model, optimizer, policy, **options) as session:
        found = _trained(model, model, optimizer, way, rank)
        session.flush()
        found |= bits_of(model, optimizer)
    return differences(reference, found), sum(deferred)


def beside_ddp_with_streams(
    rank: int, world: int, late: bool, orders: bool, fault: str = "none", **case: Any
) -> tuple[list[str], int]:
    """As `beside_ddp`, with the CPU taken for a device with streams, and one of the waits left out."""
    with FAULTS[fault](), streams_on_the_host(late, orders):
        return beside_ddp(rank, world, **case)


def _tells_at_once(really: Any) -> Any:
    def run_above(staging: Staging, tensors: Sequence[int], work: Callable[[], object], then: Callable[[None], None]) -> None:
        really(staging, tensors, work, lambda error: None)
        then(None)

    return run_above


FAULTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "the script's stream does not wait for norms": lambda: patch.object(SumsInStream, "join_norms", lambda sums: None),
    "the host does not wait for norms": lambda: patch.object(Staging, "run_above", _tells_at_once(Staging.run_above)),
}


def norms_learned(rank: int, world: int, way: str, orders: bool) -> float | None:
    """The order of norms that a session on a device has seen a script read, and nothing else of its gradients."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with streams_on_the_host(True, orders), _attach(world, model, optimizer, "wfbp") as session:
        _trained(model, model, optimizer, way, rank)
        clips = session._parts.planner.clips
        assert clips is None or isinstance(clips, float)
        return clips


def crosses_though_sums_come_in_time(rank: int, world: int, way: str) -> bool:
    """Whether updates may still be deferred after steps whose sums have all come between the script's use and its step."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clip = WAYS[way][0]
    with held_network(lambda message: True), _attach(world, model, optimizer) as session:

        def and_wait(params: Params, step: int, rank: int) -> Any:
            seen = clip(params, step, rank)
            session._parts.driver.wait_for_all()
            return seen

        _trained(model, model, optimizer, and_wait, rank)
        return session._parts.crosses


def beside_ddp_with_fewer_threads(rank: int, world: int, backend: str, when: str) -> list[str]:
    """Names that differ from DDP's, where the script lets torch use fewer threads from step 5 on, "before backward" or
    "before clipping". The sum of absolute values has other bits then.
    """

    def trained(model: nn.Module, call: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        generator, seen = torch.Generator().manual_seed(rank), {}
        torch.set_num_threads(2)
        for step in range(STEPS):
            if step == 5 and when == "before backward":
                torch.set_num_threads(1)
            optimizer.zero_grad()
            call(torch.randn(8, 600, generator=generator)).square().mean().backward()
            if step == 5 and when == "before clipping":
                torch.set_num_threads(1)
            seen[f"norm {step}"] = clip_grad_norm_(model.parameters(), 0.1, norm_type=1)
            optimizer.step()
        return {**bits_of(model, optimizer), **seen}

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    threads = torch.get_num_threads()
    try:
        model, optimizer = made()
        reference = trained(model, DistributedDataParallel(model), optimizer)
        model, optimizer = made()
        options: dict[str, Any] = {"order": 1, "most_bytes": 2**22, "backend": backend}
        with small_batches(), held_network(lambda message: True), _attach(world, model, optimizer, **options) as session:
            found = trained(model, model, optimizer)
            session.flush()
            found |= bits_of(model, optimizer)
        return differences(reference, found)
    finally:
        torch.set_num_threads(threads)


def ends_alike(rank: int, world: int, way: str, backend: str) -> list[list[float]]:
    """On each of more than two ranks: the sums of all that there is in the end, and what was seen."""
    torch.manual_seed(7)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with small_batches(), _attach(world, model, optimizer, backend=backend) as session:
        found = _trained(model, model, optimizer, way, rank)
        session.flush()
        found |= bits_of(model, optimizer)
    return [value.double().flatten().tolist() for value in found.values()]


def ends_alike_with_streams(rank: int, world: int, orders: bool, **case: Any) -> list[list[float]]:
    """As `ends_alike`, with the CPU taken for a device with streams."""
    with streams_on_the_host(True, orders):
        return ends_alike(rank, world, **case)


def one_dies_before_its_norms(rank: int, world: int, culprit: int, backend: str) -> tuple[str, bool]:
    """On each other rank: the error that ends the job, and that the norms had not come: the culprit is killed where it would
    send its own.
    """
    compute = NormsExchange._compute

    def dies(exchange: NormsExchange, batch: Sequence[int]) -> None:
        if rank == culprit and session._parts.driver.iteration == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        compute(exchange, batch)

    torch.manual_seed(7)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = _attach(world, model, optimizer, backend=backend, timeout=60)
    with patch.object(NormsExchange, "_compute", dies):
        try:
            _trained(model, model, optimizer, "by torch", rank)
        except gradlane.errors.JobError as error:
            norms = session._parts.driver.norms
            assert norms is not None
            return f"{type(error).__name__}: {error}", not norms.are_there
        finally:
            session.close()
    raise AssertionError("the job went on")
