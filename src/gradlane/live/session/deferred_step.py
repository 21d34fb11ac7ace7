"""DeferredStep: the user's own optimizer, stepped later and for a few parameters at a time.

The step runs on a shallow copy of the optimizer, whose groups hold only those parameters and which
shares the original's state. It updates them bit for bit as the whole step would, provided that each
update depends only on the parameter's own gradient and state. The hyper-parameters and torch's settings are those of the
time of `step()`, since a script may change them before a deferred update runs.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gradlane.live.session.guarded_states import attributes_of, own_class
from gradlane.live.session.numerics import Numerics
from gradlane.live.session.own_attributes import OwnAttributes, differ, slot_of
from gradlane.live.session.script_lines import TORCH, is_inside_itself
from gradlane.live.session.tracked import Tracked
from gradlane.live.torch_modes import outside_of_modes

# Optimizers that update each parameter from its own gradient and state alone. LBFGS, and whatever
# takes a norm over all parameters, does not. The step of an optimizer that is not listed here waits
# for all gradients.
PER_PARAMETER: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
        "Adafactor", "Muon",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip


# what torch wraps `step` in; a script's own wrapper, which may do anything, has other code
_RUNS_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
_SETS_GRAD_MODE = _use_grad_for_differentiable(lambda optimizer: None).__code__


def is_inside_its_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` of `optimizer` was called by its own `step()`; asked from a hook of the inner call.

    Torch wraps the `step` of each class, so that hooks run once more in `super().step()`.
    """
    return own_class(optimizer) not in PER_PARAMETER and is_inside_itself(_RUNS_HOOKS, optimizer)


def is_stepping(frame: FrameType | None, besides: int = 0) -> bool:
    """Whether `step()` of an optimizer runs in the stack of `frame`, besides so many inner ones."""
    while frame is not None:
        if frame.f_code is _RUNS_HOOKS:
            if not besides:
                return True
            besides -= 1
        frame = frame.f_back
    return False


def why_it_needs_the_barrier(optimizer: torch.optim.Optimizer) -> str | None:
    """Why updates of `optimizer` must not be deferred; None if they may be."""
    if own_class(optimizer) in PER_PARAMETER:  # another session may have deferred some of its updates
        return None
    return (
        f"{type(optimizer).__name__} is not known to update each parameter from its own gradient alone; pass "
        "cross_barrier=True to gradlane.attach if it does"
    )


def why_not_copied(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a step of a script's own optimizer cannot run on a copy of it, as deferred updates do; None if it can."""
    slot = slot_of(optimizer)
    return None if slot is None else f"{own_class(optimizer).__name__} keeps {slot} in __slots__, which are not copied"


def keeps_no_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` is known to keep no reference to `param.grad`, as that of a script's own subclass may.

    Only such an optimizer may see the memory in which the next gradient is summed.
    """
    return own_class(optimizer) in PER_PARAMETER


def is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the script has put another function in the place of `step` of one of `PER_PARAMETER`, for all its instances, or
    of one that `step` calls.
    """
    kind: Any = own_class(optimizer)
    if kind not in PER_PARAMETER:
        return False
    if "_init_group" in attributes_of(optimizer):
        return True
    return not all(_is_of_torch(namespace.get(name)) for namespace, name in _called_by_step(kind))


@functools.cache
def _called_by_step(kind: Any) -> list[tuple[Mapping[str, Any], str]]:
    """Where `step` is, and what it calls: methods of `kind` and its bases, functions of their modules."""
    bases = kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]
    methods: list[tuple[Mapping[str, Any], str]] = [
        (vars(base), name) for base in bases for name in ("step", "_init_group") if name in vars(base)
    ]
    modules = [sys.modules[base.__module__] for base in bases]
    functions = [
        (vars(module), name)
        for module in modules
        for name, value in vars(module).items()
        if callable(value)
        and name.lower().endswith(tuple(base.__name__.lower() for base in bases))
        and not isinstance(value, type)
    ]
    return methods + functions


def _is_of_torch(function: Any) -> bool:
    while hasattr(function, "__code__") and function.__code__.co_filename.startswith(TORCH):
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__  # torch wraps it too
    return False


def mode_of_step() -> str:
    """The mode of torch under which a step runs now, and a deferred update would not; "" if there is none."""
    if torch.is_inference_mode_enabled():  # state that is made in it must not be changed outside of it
        return "torch.inference_mode()"
    function_modes = (torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack()))
    others = [mode for mode in function_modes if type(mode) is not DeviceContext]  # that of a default device changes no update
    others += _get_current_dispatch_mode_stack()
    return (
        "" if all(getattr(mode, "sees_updates_at_any_time", False) for mode in others) else "a mode that sees torch's functions"
    )


def as_at_step() -> contextlib.AbstractContextManager[Any]:
    """Run a deferred update as `step()` would have run it.

    The first use of a parameter may be inside a trace, an export, functorch's levels, or dispatch and
    function modes; the update must not be. Torch's optimizers round otherwise while something is compiled.
    """
    return _outside_of_a_compilation() if torch.compiler._is_compiling_flag else outside_of_modes()


@contextlib.contextmanager
def _outside_of_a_compilation() -> Iterator[None]:
    with outside_of_modes():
        torch.compiler._is_compiling_flag = False
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = True


class DeferredStep:
    """The deferred updates of one call of `optimizer.step()`, with the call's hyper-parameters.

    Args:
        optimizer: the one that is about to step.
        now: the parameters that it updates at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, now: Sequence[Tracked] = ()) -> None:
        self.optimizer = optimizer
        self.owes = 0  # updates that have not run yet
        self._entries = len(attributes_of(optimizer)["state"])
        self._class: Any = own_class(optimizer)
        self._at_step = self._class.step  # a script may put another function there later
        attributes, groups = attributes_of(optimizer), [_options(group) for group in optimizer.param_groups]
        if self._class in PER_PARAMETER:
            groups = [group | _found_out_already(group) for group in groups]
        # it may count its steps, or keep other things that a step changes
        self._own = None if self._class in PER_PARAMETER else OwnAttributes(optimizer)
        # a GradScaler gives a fused optimizer these for the time of the call, and changes its scale in place
        lent = {name: attributes[name] for name in ("grad_scale", "found_inf") if name in attributes}
        if lent:
            attributes = attributes | {name: None if value is None else value.clone() for name, value in lent.items()}
        self._attributes, self._groups = attributes, groups
        self._group_of = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
        of_torch = self._class in PER_PARAMETER
        self._versions = None if of_torch or len(groups) > 1 else [(tracked, tracked.param._version) for tracked in now]
        self._numerics = Numerics(next(param.device.type for group in optimizer.param_groups for param in group["params"]))

    @property
    def may_be_half_done(self) -> bool:
        """Whether `step()`, which has raised, may have changed something, or would have with all gradients.

        It goes from group to group and from parameter to parameter. A script's own optimizer may check something first of
        all: with one group it has changed nothing if it has updated no parameter.
        """
        return self._versions is None or any(tracked.param._version != version for tracked, version in self._versions)

    def update(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Update `params`, whose `.grad` must hold the sums, with the call's hyper-parameters."""
        members: dict[int, list[torch.nn.Parameter]] = {}
        for param in params:
            members.setdefault(self._group_of[id(param)], []).append(param)
        self._step(self._part(), members)

    def _part(self) -> Any:
        """A shallow copy of the optimizer as it was when `step()` began, which updates some of its parameters."""
        part = object.__new__(self._class)
        part.__dict__ = dict(self._attributes) if self._own is None else self._own.copy_for(part)
        part.__dict__.pop("step", None)  # the wrapper with which an LR scheduler counts steps
        part._optimizer_step_pre_hooks = OrderedDict()
        part._optimizer_step_post_hooks = OrderedDict()
        return part

    def ended(self) -> None:
        """Sort the entries that this step made in the optimizer's state; its last update has run.

        They were made in the order in which gradients arrived, and get the order of the optimizer's
        parameters, in which `step()` would have made them.
        """
        state = attributes_of(self.optimizer)["state"]  # another session may still have deferred some of its updates
        if len(state) > self._entries:
            places = {param: place for place, param in enumerate(self._group_of)}
            made = list(state)[self._entries :]
            for param in sorted(made, key=lambda param: places.get(id(param), len(places))):
                state[param] = state.pop(param)

    def update_copies(
        self, copies: Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter, dict[str, torch.Tensor]]]
    ) -> str | None:
        """Update copies of parameters as `update` would update the parameters.

        Args:
            copies: for each parameter: the parameter, its copy, and the optimizer state to use. The
                copy and that state are changed in place.

        Returns:
            The name of an attribute, or of a group's value, that the optimizer's own `step()` left different; None if
            there is none.
        """
        members: dict[int, list[torch.nn.Parameter]] = {}
        states: defaultdict[torch.nn.Parameter, dict[str, torch.Tensor]] = defaultdict(dict)
        for param, copied, state in copies:
            members.setdefault(self._group_of[id(param)], []).append(copied)
            states[copied] = state
        part = self._part()
        part.__dict__["state"] = states
        self._step(part, members)
        return self._left_otherwise(part, sorted(members))

    def _left_otherwise(self, part: Any, groups: Sequence[int]) -> str | None:
        """See `update_copies`. Looks at what a step of `part` has changed; the optimizer's own step is over."""
        for index, group in zip(groups, part.param_groups, strict=True):
            mine = self.optimizer.param_groups[index]
            for key in group.keys() - {"params"}:
                if differ(group[key], self._groups[index].get(key)) and differ(group[key], mine.get(key)):
                    return f"param_groups[{index}][{key!r}]"
        mine = attributes_of(self.optimizer)
        began = self._attributes if self._own is None else self._own.copy_for(part)
        for key in part.__dict__.keys() - {"param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}:
            found = part.__dict__[key]
            # what refers to the optimizer refers to `part` in the copy
            if differ(found, began.get(key)) and differ(found, mine.get(key), {(id(part), id(self.optimizer))}):
                return str(key)
        return None

    def _step(self, part: Any, members: dict[int, list[torch.nn.Parameter]]) -> None:
        part.param_groups = [{**self._groups[index], "params": params} for index, params in sorted(members.items())]
        with self._numerics.in_force():
            self._bare_step(part)

    @functools.cached_property
    def _bare_step(self) -> Callable[[Any], Any]:
        """The optimizer's `step` without what torch wraps it in.

        One wrapper profiles the call and runs hooks, which ran at `step()`. Another sets the grad
        mode, with two calls into the compiler that cost more than the rest of it.
        """
        step: Any = self._at_step
        if getattr(step, "__code__", None) is _RUNS_HOOKS:
            step = step.__wrapped__
        if getattr(step, "__code__", None) is not _SETS_GRAD_MODE:
            return cast(Callable[[Any], Any], step)
        step, enabled = step.__wrapped__, self.optimizer.defaults["differentiable"]

        def in_grad_mode(part: Any) -> None:
            before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(enabled)
            try:
                step(part)
            finally:
                torch._C._set_grad_enabled(before)

        return in_grad_mode


def _found_out_already(group: dict[str, Any]) -> dict[str, Any]:
    """What each call of the optimizer would find out about its kernels: on the CPU none is `foreach` by itself.

    The search costs a microsecond a call.
    """
    is_open = "foreach" in group and group["foreach"] is None and group.get("fused") is None
    return {"foreach": False} if is_open and all(map(_is_cpu, group["params"])) else {}


_is_cpu = operator.attrgetter("is_cpu")


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A group of parameters, whose options are as they are now."""
    return {key: value if key == "params" else _as_it_is(value) for key, value in group.items()}


def _as_it_is(value: Any) -> Any:
    """A copy of an option, if it may change in place: a tensor, an array, or a container that may have them."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.clone()
    if kind is np.ndarray:
        return value.copy()
    if kind is dict:
        return {key: _as_it_is(item) for key, item in value.items()}
    return kind(map(_as_it_is, value)) if kind in (list, tuple) else value
