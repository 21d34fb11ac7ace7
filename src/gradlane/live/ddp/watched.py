"""Measures a script's own DistributedDataParallel for some steps, and then ends the script.

For `gradlane advise`. The script knows nothing of it: the class that it wraps its model in notes
times, and steps are counted by its optimizer. After some steps as they are come a few with a
communication hook, which knows what is sent when. Then the network is measured, between two steps.
The last steps sum nothing, so that they show computing alone. They make replicas differ, so the
script is ended right after them, on all ranks.
"""

# torch's class has no types
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradlane.core.records.ddp_run import DdpRun
from gradlane.errors import described
from gradlane.live.adapt.profile_builder import ProfileBuilder
from gradlane.live.backends import probe
from gradlane.live.backends.gradient_buffers import spec_of
from gradlane.live.comm.recorder import now_ns
from gradlane.live.ddp.buckets import Buckets
from gradlane.live.ddp.parameter_reads import ParameterReads
from gradlane.live.ddp.stages import Progress, Stage
from gradlane.live.session.hooks import tensors_in
from gradlane.live.session.ignored import summed_parameters
from gradlane.live.startup.launched import listen_to_attach

RUN, WHY_NOT = "run.json", "why-not.txt"
"""Files that rank 0 leaves: what it measured, or why it could not."""
WARM, WATCHED, LEAST_ALONE = 3, 4, 6
"""Numbers of steps: to warm up, with a hook, and without sums at least. The first and the last with a hook are partial. The
first without sums is discarded.
"""
GRACE_S = 10.0
"""How long a script may take to end after `SystemExit` was raised in it."""


def watch_ddp(folder: Path, steps: int) -> Watch:
    """From now on the script's DistributedDataParallel is watched, in this process.

    Args:
        folder: rank 0 leaves `RUN` or `WHY_NOT` there.
        steps: how many to measure as they are.
    """
    watch = Watch(folder, steps)
    WatchedDistributedDataParallel.watch = watch
    torch.nn.parallel.DistributedDataParallel = WatchedDistributedDataParallel  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = WatchedDistributedDataParallel  # type: ignore[misc]
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: watch.before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: watch.after_step(optimizer))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(torch.nn.utils, name, _noting(name, getattr(torch.nn.utils, name), watch))
    torch.amp.GradScaler.step = _noting_scale(torch.amp.GradScaler.step, watch)  # type: ignore[method-assign]
    listen_to_attach(watch.attaches)
    return watch


def _noting(name: str, clip: Any, watch: Watch) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        watch.clips = True
        order = kwargs.get("norm_type", args[2] if len(args) > 2 else 2.0)
        watch.reads_norms_alone &= name == "clip_grad_norm_" and float(order) == 2
        return clip(*args, **kwargs)

    return noted


def _noting_scale(step: Any, watch: Watch) -> Any:
    def noted(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        watch.scales |= scaler.is_enabled()
        return step(scaler, *args, **kwargs)

    return noted


class WatchedDistributedDataParallel(TorchDDP):
    """Torch's class, whose passes are timed."""

    watch: ClassVar[Watch]
    own_hook = ""  # name of the script's communication hook

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch.models.append(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, as torch's class does."""
        if not (self.module.training and torch.is_grad_enabled() and self.watch.follows(self)):
            return super().forward(*inputs, **kwargs)
        self.watch.forward_begins()
        output = super().forward(*inputs, **kwargs)
        self.watch.forward_ended(output)
        return output

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """As torch's, noting the script's own hook."""
        self.own_hook = self.watch.name_of(hook)
        super().register_comm_hook(state, hook)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes sum gradients; `no_sync()` sets it, and so do trainers."""
        return bool(self.__dict__.get("_syncs", True)) and not self.watch.is_alone

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncs: bool) -> None:
        self.__dict__["_syncs"] = syncs


class Watch:
    """What a process measures of one model. Everything runs on the training thread.

    Args:
        folder, steps: as for `watch_ddp`.

    Attributes:
        models: wrapped by the script, in order.
        clips: the script has clipped gradients.
        scales: the script has stepped with a GradScaler.
        reads_norms_alone: if it has, always by their norm of order 2.
        reads_parameters: the script has read its parameters after each step that was looked at.
        is_alone: gradients are not summed at present.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self.models: list[WatchedDistributedDataParallel] = []
        self.clips = self.scales = self.is_alone = self.reads_parameters = False
        self.reads_norms_alone = True
        self._parameter_reads: ParameterReads | None = None  # until the next forward pass
        self._call: WatchedDistributedDataParallel | None = None
        self._trained: set[int] = set()
        self._optimizer: torch.optim.Optimizer | None = None
        self._over = self._attaches = False
        self._step = 0  # the one that runs
        self._ends_ns: list[int] = []  # of steps
        self._forward_ns = self._forward_ended_ns = self._backward_began_ns = self._update_ns = 0
        self._passes = (0, 0, 0)  # forward, backward, and between them
        self._waited_ns: list[int] = [0]  # by step
        self._used: dict[str, int] = {}
        self._used_directly: set[str] = set()
        self._ready: dict[str, int] = {}
        self._handles: list[Any] = []
        self._buckets: Buckets | None = None
        self._progress = Progress(
            [
                Stage(0, WARM, f"{WARM} steps until DDP has its buckets"),
                Stage(WARM, steps, f"measuring {steps} steps as they are"),
                Stage(self._hooked, WATCHED, f"measuring {WATCHED} steps with times of each bucket"),
                Stage(self._alone, 0, "measuring the network"),
                Stage(self._alone, self.last - self._alone, f"measuring {self.last - self._alone} steps without sums"),
            ]
        )

    def name_of(self, hook: Any) -> str:
        """The name of a hook that a script has registered; "" for this class's own."""
        own = getattr(hook, "__module__", "") == Buckets.__module__
        return "" if own else str(getattr(hook, "__qualname__", type(hook).__name__))

    # -- the stages: which steps are for what ------------------------------------------------------

    @property
    def _hooked(self) -> int:
        """The first step with a hook."""
        return WARM + self._steps

    @property
    def _alone(self) -> int:
        """The first step without sums."""
        return self._hooked + WATCHED

    @property
    def last(self) -> int:
        """The last step."""
        return self._alone + max(LEAST_ALONE, self._steps // 2)

    # -- passes ------------------------------------------------------------------------------------

    def follows(self, call: WatchedDistributedDataParallel) -> bool:
        """Whether `call`, which trains, is the model that is measured: the first that trains."""
        if self._over:
            return False
        self._trained.add(id(call))
        if self._call is None:
            self._call = call
            self._say()
        return call is self._call

    def forward_begins(self) -> None:
        """The model is about to be called."""
        if self._parameter_reads is not None:
            self.reads_parameters = self._parameter_reads.end() and (self.reads_parameters or self._step == 1)
            self._parameter_reads = None
        self._used.clear()
        self._used_directly.clear()
        self._forward_ns = self._now()

    def forward_ended(self, output: Any) -> None:
        """The model has been called."""
        self._forward_ended_ns = self._now()
        self._passes = (self._forward_ended_ns - self._forward_ns, 0, 0)
        self._backward_began_ns = 0
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _: torch.Tensor) -> None:
        if self._backward_began_ns:
            return
        self._ready.clear()
        self._backward_began_ns = self._now()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        # DDP has queued its waiting by now if it sums, so what is queued here comes after that
        ended = self._now()
        began = self._backward_began_ns
        self._passes = (self._passes[0], ended - began, began - self._forward_ended_ns)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._summed(ended))

    def _summed(self, ended_ns: int) -> None:
        now = now_ns()
        self._waited_ns[-1] += now - ended_ns
        if self._buckets is not None and not self.is_alone:
            at, began = self._buckets.iteration, self._backward_began_ns
            self._buckets.rows += [
                ("forward", at, -1, self._forward_ns, self._forward_ns + self._passes[0]),
                ("backward", at, -1, began, now),
                ("wait", at, -1, ended_ns, now),
            ]

    def _gradient_ready(self, name: str) -> None:
        self._ready[name] = self._now() - self._backward_began_ns

    def _module_begins(self, own: list[str], inner: list[str]) -> None:
        since = self._now() - self._forward_ns
        for name in inner:  # of a part that may read them itself (MultiheadAttention); else it says so later
            if name not in self._used_directly:
                self._used[name] = since
        for name in own:
            if name not in self._used_directly:
                self._used[name] = since
                self._used_directly.add(name)

    def _now(self) -> int:
        """The time; while the profile is measured, with the device waited for."""
        if self.is_alone and self._call is not None:
            probe.wait_for_device(self._device)
        return now_ns()

    # -- steps -------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to step."""
        if self._call is None or self._over:
            return
        if self._optimizer is None:
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            if held.isdisjoint(map(id, self._call.module.parameters())):
                return
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self._update_ns = self._now()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped: the end of a step of the script."""
        if optimizer is not self._optimizer or self._call is None:
            return
        if self._over:  # the script has caught what was to end it
            _end_now()
        if self._step >= self._alone or self._step == self._hooked - 1:
            probe.wait_for_device(self._device)
        now = now_ns()
        if self._buckets is not None and not self.is_alone:
            self._buckets.rows.append(("update", self._buckets.iteration, -1, self._update_ns, now))
            if self._step > self._hooked:
                self._buckets.rows.append(("step", self._buckets.iteration, -1, self._ends_ns[-1], now))
        if self._step > self._alone:
            self._note_profile(now)
        self._ends_ns.append(now)
        self._step += 1
        self._waited_ns.append(0)
        self._begin_stage()
        self._say()
        if self._step < WARM:
            self._parameter_reads = ParameterReads(self._call.module.parameters())
            self._parameter_reads.begin()

    def _say(self, *, between: bool = False) -> None:
        assert self._call is not None
        if dist.get_rank(self._call.process_group) == 0:
            self._progress.show(self._step, self._ends_ns, between=between)

    def _begin_stage(self) -> None:
        """Do what comes between the last step and the next."""
        assert self._call is not None
        call = self._call
        if self._step == self._hooked and not call.own_hook and self._device.type == "cpu":
            try:
                self._buckets = Buckets(call)
            except RuntimeError:  # DDP takes one hook, and has a built-in one of the script
                call.own_hook = "built into torch"
        if self._buckets is not None:
            self._buckets.iteration = self._step - self._hooked
        if self._step == self._alone:
            self._say(between=True)
            group, device = call.process_group, self._device
            self._network = probe.measure(group, device).network(group, device, "measured by gradlane advise")
            self.is_alone = True
            self._hook_parts(call.module)
        if self._step == self.last:
            self._over = True
            self._progress.end()
            self._finish(call)

    @property
    def _device(self) -> torch.device:
        assert self._call is not None
        device: torch.device = next(self._call.module.parameters()).device
        return device

    def _hook_parts(self, module: nn.Module) -> None:
        assert self._call is not None
        summed = summed_parameters(module, self._call.parameters_to_ignore)
        trained = {name: param for name, param in summed if param.requires_grad}
        self._builder = ProfileBuilder([spec_of(name, param) for name, param in trained.items()])
        for name, param in trained.items():
            hook = lambda _, name=name: self._gradient_ready(name)  # noqa: E731
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
        names = {id(param): name for name, param in trained.items()}
        for part in module.modules():
            own = [names[id(param)] for param in part.parameters(recurse=False) if id(param) in names]
            inner = [names[id(param)] for param in part.parameters() if id(param) in names]
            if own or part is module:
                inner = [name for name in inner if name not in own]
                hook = lambda *_, own=own, inner=inner: self._module_begins(own, inner)  # noqa: E731
                self._handles.append(part.register_forward_pre_hook(hook))

    def _note_profile(self, now: int) -> None:
        for name, since in self._ready.items():
            self._builder.ready((name,), since)
        for name, since in self._used.items():
            self._builder.used(name, since)
        self._builder.passed(*self._passes)
        self._builder.updated(now - self._update_ns)

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, call: WatchedDistributedDataParallel) -> None:
        group, device = call.process_group, self._device
        lengths = [after - before for before, after in zip(self._ends_ns, self._ends_ns[1:], strict=False)]
        measured, alone = lengths[WARM - 1 : self._hooked - 1], lengths[self._alone : self.last - 1]
        slowest = torch.tensor([*measured, *alone], dtype=torch.int64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        rank, workers = dist.get_rank(group), dist.get_world_size(group)
        waits = torch.zeros(workers, dtype=torch.int64, device=device)
        waits[rank] = round(median(self._waited_ns[WARM : self._hooked]))
        dist.all_reduce(waits, group=group)
        steps = [int(taken) for taken in slowest.tolist()]
        if rank == 0:
            model = type(call.module).__name__
            plan = None if self._buckets is None else self._buckets.plan("ddp", model)
            seen = None if plan is None or self._buckets is None else self._buckets.timeline(plan, 0, 1, WATCHED - 1)
            run = DdpRun(
                model=model,
                device=str(device),
                workers=workers,
                step_ns=tuple(steps[: len(measured)]),
                alone_ns=tuple(steps[len(measured) :]),
                waits_ns=tuple(int(wait) for wait in waits.tolist()) if device.type == "cpu" else (),
                profile=self._builder.build(model, str(device), self._builder.ready_medians()),
                network=self._network,
                plan=plan,
                timeline=seen,
                hook=call.own_hook,
                clips=self.clips,
                reads_parameters=self.reads_parameters,
                scales=self.scales,
                reads_norms_alone=self.reads_norms_alone,
                others=len(self._trained) - 1,
            )
            part = self._folder / f"{RUN}.part"
            part.write_bytes(run.to_json())
            part.replace(self._folder / RUN)
        # no rank ends before rank 0 has written: torchrun ends the others when one is gone
        dist.all_reduce(waits, group=group)
        _end_script()

    def attaches(self) -> None:
        """The script attaches gradlane itself. It is ended if it has wrapped no model for DDP: there is nothing to measure.

        Raises:
            SystemExit: it is ended; rank 0 says why when the script has ended.
        """
        if not self.models:
            self._attaches = True
            _end_script()

    def say_why_not(self, error: BaseException | None) -> None:
        """The script has ended; if that was too early, leave the reason. For rank 0.

        Args:
            error: what ended it, if it was not its last line.
        """
        if self._over:
            return
        self._progress.end()
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            why = f"the script failed after {self._step} steps: {described(error)}"
        elif self._attaches:
            why = (
                "the script attaches gradlane itself, and advice is for torch's DistributedDataParallel; "
                "`gradlane launch --progress 10` says what its steps wait for"
            )
        elif not self.models:
            why = "the script wrapped no model in torch's DistributedDataParallel"
        elif self._call is None:
            why = "the script never called its wrapped model for training"
        elif self._optimizer is None:
            why = "no optimizer of torch.optim stepped with the wrapped model's parameters, and steps are counted by it"
        else:
            why = f"the script ended after {self._step} steps, expected {self.last}; let it train longer, or give fewer --steps"
        (self._folder / WHY_NOT).write_text(why)


def _end_script() -> NoReturn:
    """End the script from within, and its process if that takes longer than `GRACE_S`."""
    timer = threading.Timer(GRACE_S, _end_now)
    timer.daemon = True
    timer.start()
    raise SystemExit(0)


def _end_now() -> None:
    """End this process and those that it started by multiprocessing, whatever it waits for."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
