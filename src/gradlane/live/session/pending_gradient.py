"""PendingGradient: stands in `param.grad` for a gradient whose sum may not have arrived.

Between a gradient's readiness and its sum, the memory of a gradient holds a value that DDP would never show. So every
operation on it, from Python or from C++ (autograd's accumulation included), comes here, waits for the sum, and runs on the
real gradient. The session's own memory is never handed out: a view, an array or `.data` is that of a copy, which belongs to
the script.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FunctionType
from typing import Any, Protocol, cast

import torch

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

    def unscales(self, several: Sequence[Tracked], factor: torch.Tensor) -> set[Tracked]:
        """As `puts_off`, for a multiplication of those gradients that are known to be finite; `factor` has one element."""


InPlace = Callable[..., object]
"""Changes gradients in place: one, or several of those for which it was noted."""
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
        """The session sums this gradient in another slot from now on: stand for that."""
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
    wrappers = {id(wrapper): wrapper for wrapper in pending_in((args, kwargs))}
    if func == _set_data and len(args) == 2 and isinstance(args[0], PendingGradient):
        args[0].replace_data(with_real(args[1], PendingGradient.own))
        return None
    if getattr(func, "overloadpacket", func) not in _GIVES_MEMORY_AWAY and not _has_effects(func):
        wait_for_sums(wrappers.values(), order_of_norm(func, args, kwargs))
        result = func(*with_real(args, _slot), **with_real(kwargs, _slot))
        result = _with_wrappers(result, {id(wrapper.slot): wrapper for wrapper in wrappers.values()})
        memory = {_memory_of(wrapper.slot) for wrapper in wrappers.values()}
        if not _escapes(result, memory, (args, kwargs)):
            return result
    # perhaps again, on copies: what hands out memory (a view, an array) has changed nothing
    return func(*with_real(args, PendingGradient.own), **with_real(kwargs, PendingGradient.own))


def _has_effects(func: Any) -> bool:
    """Whether `func` may do more than compute, so that it must run once: a collective, or a function that is not torch's."""
    if not isinstance(func, FunctionType):
        return False
    module = f"{func.__module__}."
    return module.startswith("torch.distributed.") or not module.startswith("torch.")


_slot: Callable[[PendingGradient], torch.Tensor] = operator.attrgetter("slot")


def _is_pending(value: Any) -> bool:
    return isinstance(value, PendingGradient)


def with_real(value: Any, real: Callable[[PendingGradient], torch.Tensor]) -> Any:
    """`value`, with each wrapper replaced by `real(wrapper)`."""
    if isinstance(value, PendingGradient):
        return real(value)
    if isinstance(value, (list, tuple)):
        items = [with_real(item, real) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: with_real(item, real) for key, item in value.items()}
    return value


def pending_in(value: Any) -> Iterator[PendingGradient]:
    """All that stand for gradients in `value`: itself, or what lists, tuples and dictionaries have."""
    if isinstance(value, PendingGradient):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from pending_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from pending_in(item)


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


GRADIENT: Any = torch.Tensor.grad
"""The attribute `.grad` of tensors."""
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
    *(_getter(name) for name in ("grad_dtype",) if hasattr(torch.Tensor, name)),  # not in older releases
    GRADIENT.__set__,
    GRADIENT.__delete__,
    _set_requires_grad,
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
