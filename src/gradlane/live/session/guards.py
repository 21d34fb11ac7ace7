"""Guards: a gradient or parameter that is not up to date cannot be read as if it were.

Between a gradient's readiness and its sum, and between `optimizer.step()` and a deferred update,
the memory of a gradient or a parameter holds a value that DDP would never show. Both are guarded,
so that the first use waits, whoever makes it (a layer, `clip_grad_norm_`, GradScaler, an EMA,
`deepcopy`, a logger):

- `PendingGradient` is a tensor subclass that stands in `param.grad`. Every operation on it, from
  Python or from C++ (autograd's accumulation included), comes here, waits for the sum, and runs on
  the real gradient. The session's own memory is never handed out: a view, an array or `.data` is
  that of a copy, which belongs to the script.
- A pending parameter keeps its identity. Only its `__class__` changes, to a subclass that sees
  every torch function applied to it, and changes back before that function runs. What reads a
  parameter without any torch function (a compiled or scripted module) gets a forward pre-hook
  instead, see `passes.py`.
- The class of an optimizer with deferred updates is changed in the same way: before anything reads,
  clears, loads or copies its `state`, all its deferred updates run.

A guard comes off last. The thread that makes an update turns torch's functions on subclasses off for itself
(`as_ordinary`); another thread that meets the guard meanwhile waits for it (`turn.py`).

This needs no map of which module uses which parameter, and it cannot miss a use inside a forward
pass in Python.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, Protocol, cast

import torch
import torch.optim.optimizer as optimizers

from gradlane.live.comm.turn import turn
from gradlane.live.session.early_uses import order_of_norm, use_early, wait_for_sums
from gradlane.live.session.tracked import Tracked


class Reads(Protocol):
    """Who hears that a gradient is used which stands for a sum. Called on any thread."""

    def read(self, several: Sequence[Tracked], order: float | None = None) -> None:
        """An operation is about to use gradients: wait for their sums.

        Args:
            several: whose gradients they are.
            order: the operation computes norms of this order; None for any other.
        """

    def norms(self, several: Sequence[Tracked], order: float) -> dict[Tracked, torch.Tensor]:
        """The norms of those gradients for which they are known before the sum is there; the caller's own tensors."""

    def puts_off(self, several: Sequence[Tracked], operation: InPlace) -> set[Tracked]:
        """Those of `several` whose gradients `operation` will change when the sum is there; the sums of the others are there
        now. `operation` is noted once for each time that a member comes.
        """


InPlace = Callable[[torch.Tensor], object]
"""Changes a gradient in place."""
OnUse = Callable[[Tracked], None]
"""Makes the parameter current."""
Part = Callable[["PendingGradient", torch.Tensor | None], torch.Tensor]
"""Gives a gradient memory that no session uses, and returns that memory: the tensor, if one is
given, else a copy. It calls `PendingGradient.given_away`."""


class PendingGradient(torch.Tensor):
    """Stands in `param.grad` for a gradient whose sum may not have arrived.

    The slot belongs to the session, which sums the next gradient in it. An operation that would hand its memory to the script
    (a view, `.data`, a NumPy array, an address) is therefore done on a copy. `part` makes the copy, and this object stands for
    it from then on.

    Args:
        slot: where the sum will be.
        tracked: whose gradient it is.
        reads: is told of each operation, with `tracked`, before it.
        part: gives this gradient memory of the script's own.

    Attributes:
        reads: None once this gradient is the script's own.
    """

    __slots__ = ("_part", "reads", "slot", "tracked")

    slot: torch.Tensor
    tracked: Tracked
    reads: Reads | None
    _part: Part

    @staticmethod
    def __new__(cls, slot: torch.Tensor, tracked: Tracked, reads: Reads, part: Part) -> PendingGradient:
        wrapper: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, slot.shape, strides=slot.stride(), dtype=slot.dtype, device=slot.device
        )
        return wrapper

    def __init__(self, slot: torch.Tensor, tracked: Tracked, reads: Reads, part: Part) -> None:
        self.slot = slot
        self.tracked = tracked
        self.reads = reads
        self._part = part

    @property
    def is_marked(self) -> bool:
        """Whether the script has given this object an attribute, or has it require a gradient."""
        return bool(self.__dict__)  # its own attributes are in slots

    def own(self) -> torch.Tensor:
        """Return the real gradient, after its sum has arrived, in memory that no session uses."""
        wait_for_sums((self,))
        return self.slot if self.reads is None else self._part(self, None)

    def replace_data(self, data: torch.Tensor) -> None:
        """Do `self.data = data`: other memory, perhaps of another dtype, takes the slot's place."""
        wait_for_sums((self,))
        if self.reads is None:
            self.slot.data = data
        else:
            self._part(self, data.detach())

    def given_away(self, memory: torch.Tensor) -> None:
        """Stand for `memory`, which is the script's, from now on. The session no longer uses it."""
        self.slot, self.reads = memory, None

    def moved(self, slot: torch.Tensor) -> None:
        """Stand for another slot from now on, in which the session sums this gradient."""
        self.slot = slot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in METADATA:
            if func in _MARKS:
                args[0]._marked = True
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it otherwise than it calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on the gradients that the wrappers in its arguments stand for."""
    early = use_early(func, args, kwargs, _is_pending)
    if early is not None:
        return early[0]
    wrappers = {id(wrapper): wrapper for wrapper in _wrappers_in((args, kwargs))}
    if func == _set_data and len(args) == 2 and isinstance(args[0], PendingGradient):
        args[0].replace_data(_with(args[1], PendingGradient.own))
        return None
    if getattr(func, "overloadpacket", func) not in _GIVES_MEMORY_AWAY and not _has_effects(func):
        wait_for_sums(wrappers.values(), order_of_norm(func, args, kwargs))
        result = func(*_with(args, _slot), **_with(kwargs, _slot))
        result = _with_wrappers(result, {id(wrapper.slot): wrapper for wrapper in wrappers.values()})
        memory = {_memory_of(wrapper.slot) for wrapper in wrappers.values()}
        if not _escapes(result, memory, (args, kwargs)):
            return result
    # perhaps again, on copies: what hands out memory (a view, an array) has changed nothing
    return func(*_with(args, PendingGradient.own), **_with(kwargs, PendingGradient.own))


def _has_effects(func: Any) -> bool:
    """Whether `func` may do more than compute, so that it must run once: a collective, or a function that is not torch's."""
    if not isinstance(func, FunctionType):
        return False
    module = f"{func.__module__}."
    return module.startswith("torch.distributed.") or not module.startswith("torch.")


_slot: Callable[[PendingGradient], torch.Tensor] = operator.attrgetter("slot")


def _is_pending(value: Any) -> bool:
    return isinstance(value, PendingGradient)


def _with(value: Any, real: Callable[[PendingGradient], torch.Tensor]) -> Any:
    """`value`, with each wrapper replaced by `real(wrapper)`."""
    if isinstance(value, PendingGradient):
        return real(value)
    if isinstance(value, (list, tuple)):
        items = [_with(item, real) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _with(item, real) for key, item in value.items()}
    return value


def _wrappers_in(value: Any) -> Iterator[PendingGradient]:
    if isinstance(value, PendingGradient):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _wrappers_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _wrappers_in(item)


def _with_wrappers(result: Any, of_slot: dict[int, PendingGradient]) -> Any:
    """`result`, with each slot replaced by its wrapper.

    In-place operations need this, since they return the tensor that they were called on.
    """
    if isinstance(result, torch.Tensor):
        return of_slot.get(id(result), result)
    if type(result) in (list, tuple):
        return type(result)(_with_wrappers(item, of_slot) for item in result)
    return result


_HOLDS_NO_MEMORY = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.Size)


def _memory_of(tensor: torch.Tensor) -> int:
    """Stands for the storage of `tensor`, which views of it share."""
    return cast(int, tensor.untyped_storage()._cdata)


def _escapes(result: Any, memory: Collection[int], given: Any) -> bool:
    """Whether `result` may give the script access to `memory`, that of the wrappers' slots.

    What was given gives none, and of a type that is not known nothing is known.

    Args:
        result: of a function of torch.
        memory: see `_memory_of`.
        given: the function's arguments.
    """
    if isinstance(result, _HOLDS_NO_MEMORY):
        return False
    if isinstance(result, torch.Tensor):
        if isinstance(result, PendingGradient):
            return False
        if result.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(result):
            return True  # its memory is in several parts, or in a tensor that it wraps
        # an operation in place returns what it was given, a list of gradients as well as one
        return _memory_of(result) in memory and not _has(given, result)
    if isinstance(result, (list, tuple)):
        return any(_escapes(item, memory, given) for item in result)
    return True


def _has(value: Any, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is in `value`."""
    if isinstance(value, (list, tuple)):
        return any(_has(item, tensor) for item in value)
    return _has(list(value.values()), tensor) if isinstance(value, dict) else value is tensor


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_gradient_attribute: Any = torch.Tensor.grad
get_gradient: Callable[[torch.Tensor], torch.Tensor | None] = _gradient_attribute.__get__
"""`.grad` of a parameter, for a thread that is `as_ordinary`; several times as fast as by its guard."""
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = _gradient_attribute.__set__
_set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_set_requires_grad: Any = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]

# these hand out a gradient's memory in a form that `_escapes` cannot see, or replace it
_GIVES_MEMORY_AWAY = {
    torch.Tensor.data_ptr,
    torch.ops.aten.set_,
    torch.ops.aten.resize_,
    torch.Tensor.resize_,
    torch.Tensor.share_memory_,
    torch.Tensor.detach_,
}

# these reveal nothing of the values, and so need not wait
METADATA = {
    *(_getter(name) for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_sparse", "is_leaf", "grad_fn")),
    *(_getter(name) for name in ("grad", "is_cuda", "is_cpu", "ndim", "is_quantized", "is_meta", "is_sparse_csr")),
    _gradient_attribute.__set__,
    _gradient_attribute.__delete__,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.is_floating_point,
    torch.is_complex,
}


_MARKS = {_set_requires_grad, torch.Tensor.requires_grad_}  # change the gradient itself, and no value


# -- parameters ------------------------------------------------------------------------------------

# by id(); the entry refers to the parameter, so that no other object gets its id
_watched: dict[int, tuple[torch.nn.Parameter, Tracked, OnUse]] = {}


as_ordinary = torch._C.DisableTorchFunctionSubclass
"""Within it, the calling thread uses watched parameters as if they were ordinary ones."""


def watch(several: Iterable[Tracked], touched: OnUse) -> None:
    """Call `touched(tracked)` before any operation that reads the parameter of one of `several`, until `unwatch`.

    `touched` makes the parameter current and then calls `unwatch`, or raises. Several threads may call it at once.
    """
    for tracked in several:
        param: Any = tracked.param
        own: Any = type(param)
        if not issubclass(own, _Pending):
            _watched[id(param)] = (param, tracked, touched)
            param.__class__ = _pending_class(own)


def is_watched(param: torch.nn.Parameter) -> bool:
    """Whether `param` is not current yet."""
    return id(param) in _watched


def unwatch(several: Iterable[Tracked]) -> None:
    """Give the parameters of `several`, which are current, their own classes back."""
    if not _watched:
        return
    for tracked in several:
        param: Any = tracked.param
        if id(param) in _watched:
            _give_class_back(param)  # before its entry goes: a thread that meets the guard looks for the entry
            del _watched[id(param)]


def _give_class_back(param: Any) -> None:
    param.__class__ = type(param).__mro__[2]  # [pending class, _Pending, own class, ...]


# in turn: another thread, which makes the update of `param`, has the sum in `.grad` meanwhile


def _get_gradient(param: Any) -> Any:
    with turn, as_ordinary():
        return _gradient_attribute.__get__(param)


def _set_gradient(param: Any, gradient: Any) -> None:
    with turn, as_ordinary():
        _gradient_attribute.__set__(param, gradient)


def _delete_gradient(param: Any) -> None:
    with turn, as_ordinary():
        _gradient_attribute.__delete__(param)


class _Pending:
    """Mixed into the class of a watched parameter."""

    # `zero_grad` gets and sets it; a quarter of what it costs by way of `__torch_function__`
    grad = property(_get_gradient, _set_gradient, _delete_gradient)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or func == _set_requires_grad:  # a parameter that is frozen keeps the update that it is owed
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for value in args:
            if isinstance(value, _Pending):
                use(value)
            elif isinstance(value, _CONTAINERS):
                use_all_in(value)
        if kwargs:
            use_all_in(kwargs)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        use(self)
        own: Any = type(self)  # by now the parameter's own class
        return own.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        use(self)
        return type(self).__reduce_ex__(self, protocol)


def use(param: Any) -> None:
    """Make a watched `param` current, by calling what `watch` was given for it."""
    entry = _watched.get(id(param))
    if entry is not None:
        _, known_as, touched = entry
        touched(known_as)
    elif isinstance(param, _Pending):
        _give_class_back(param)  # a copy that another thread has made of a watched one


def current(value: Any) -> Any:
    """`value` for code that reads memory past every guard.

    Returns:
        `value`, whose parameters are current. A gradient that stands for a sum is replaced by the tensor that the script
        has in `.grad` from then on; lists, tuples and dictionaries that have any by others.
    """
    if isinstance(value, _Pending):
        use(value)
    elif isinstance(value, PendingGradient):
        return value.own()
    elif isinstance(value, _CONTAINERS):
        use_all_in(value)
        if next(_wrappers_in(value), None) is not None:
            return _with(value, PendingGradient.own)
    return value


_CONTAINERS = (list, tuple, set, dict)


def use_all_in(values: Any) -> None:
    """Make all watched parameters current that are in `values`, one of `_CONTAINERS`."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, _Pending):
            use(value)
        elif isinstance(value, _CONTAINERS):
            use_all_in(value)


@functools.cache
def _pending_class(own: type) -> Any:
    """Make the subclass of `own` that sees every torch function.

    It has the layout of `own`, so that `__class__` may be assigned, and the name, which a script may print.
    """
    pending = type(own)(own.__name__, (_Pending, own), {"__module__": own.__module__})
    if own in optimizers._foreach_supported_types:  # an optimizer takes the same kernels for it
        optimizers._foreach_supported_types.append(pending)  # type: ignore[arg-type]
    return pending


# -- optimizers ------------------------------------------------------------------------------------

# by id(); the entry refers to the optimizer, so that no other object gets its id. Several sessions may share an optimizer:
# the dictionary has each owner of deferred updates, by its id(), and what runs them
_owing: dict[int, tuple[torch.optim.Optimizer, dict[int, tuple[object, Callable[[], None]]]]] = {}
_own_classes: dict[type, type] = {}  # an optimizer's pending class -> its own


def watch_state(optimizer: torch.optim.Optimizer, owner: object, settle: Callable[[], None]) -> None:
    """Call `settle()` before anything accesses `optimizer.state`, until `unwatch_state`.

    Args:
        optimizer: whose state is not up to date.
        owner: has deferred updates of `optimizer`, beside others that may have some too.
        settle: runs the owner's deferred updates. Several threads may call it at once.
    """
    own: Any = type(optimizer)
    _owing.setdefault(id(optimizer), (optimizer, {}))[1][id(owner)] = (owner, settle)
    if own not in _own_classes:
        optimizer.__class__ = _pending_optimizer_class(own)


@functools.cache
def _pending_optimizer_class(own: Any) -> Any:
    pending = derived(own, __getattribute__=_get_attribute, __setattr__=_set_attribute)
    _own_classes[pending] = own
    return pending


def derived(own: Any, **methods: Any) -> Any:
    """A subclass of an optimizer's class, for its `__class__`.

    It has the same name, which torch's profiler and LR schedulers' messages show. It has no other base: Python refuses
    `__class__` another layout, which it may have where `own` has several bases.
    """
    return type(own)(own.__name__, (own,), {"__module__": own.__module__, **methods})


def unwatch_state(optimizer: torch.optim.Optimizer, owner: object) -> None:
    """Note that `owner` has no deferred updates of `optimizer`, which has its own class once no owner has any."""
    entry = _owing.get(id(optimizer))
    if entry is not None and entry[1].pop(id(owner), None) is not None and not entry[1]:
        unwatch_state_for_all(optimizer)


def unwatch_state_for_all(optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer` its own class back, whoever has deferred updates of it."""
    if _owing.pop(id(optimizer), None) is not None:
        optimizer.__class__ = own_class(optimizer)


def own_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that the script made `optimizer` of, also while its state is watched."""
    found = type(optimizer)
    return _own_classes.get(found, found)


# these show, replace or copy the state; everything else of an optimizer (groups, learning rates,
# defaults) is already as it is after step()
GETS_AT_STATE = frozenset(("state", "__dict__", "__setstate__", "__getstate__", "__reduce_ex__", "__deepcopy__"))


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of `optimizer`, whose state may not be up to date."""
    found: dict[str, Any] = object.__getattribute__(optimizer, "__dict__")
    return found


def _get_attribute(optimizer: Any, name: str) -> Any:
    if name in GETS_AT_STATE and id(optimizer) in _owing:
        _settle(optimizer)
        return getattr(optimizer, name)  # by now the optimizer has its own class again
    return own_class(optimizer).__getattribute__(optimizer, name)


def _set_attribute(optimizer: Any, name: str, value: Any) -> None:
    if name in GETS_AT_STATE:
        _settle(optimizer)
    own_class(optimizer).__setattr__(optimizer, name, value)


def _settle(optimizer: Any) -> None:
    entry = _owing.get(id(optimizer))
    if entry is None:
        return
    for owner, settle in list(entry[1].values()):
        settle()
        unwatch_state(optimizer, owner)
