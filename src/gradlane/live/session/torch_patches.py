"""Patches of functions through which torch reads parameters in C++, past the guards of `guarded_params.py`.

TorchScript reads a module's parameters directly from its dictionary, and those that a scripted function
is given as they are. Functorch wraps parameters, and other functions copy a tensor or take over its
memory. None of these calls a torch function. A tensor class may run functions with those of other classes turned off, and
an `autograd.Function` may save what it does not read. The patched ones first run deferred updates, see `before_leaving`.
TorchScript would also compile the hooks of a module, and a session's cannot be compiled; they are taken
off the module meanwhile. Compiled code must meet no guard and no gradient that stands for a sum, which
the compiler would trace into; see `watch_compiled_code`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch._dynamo.eval_frame as dynamo
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.distributed
import torch.jit._recursive as torchscript
import torch.nested
import torch.utils._foreach_utils as foreach
import torch.utils.dlpack

from gradlane.live.session import guarded_params, outdated
from gradlane.live.session.hooks import Hook
from gradlane.live.session.pending_gradient import METADATA, PendingGradient

_settlers: dict[int, Callable[[], None]] = {}  # by id() of the owner: runs its deferred updates


class ReadByCompiledCode(Protocol):
    """A session, as compiled code concerns it."""

    def before_compiled_code(self, module: torch.nn.Module | None) -> None:
        """Compiled code is about to run: a method of `module`, or a function of the script, which may read anything."""


_read_by_compiled_code: weakref.WeakSet[ReadByCompiledCode] = weakref.WeakSet()


def _before(really: Callable[..., Any]) -> Callable[..., Any]:
    def settle_first(*args: Any) -> Any:
        _settle_all()
        return really(*args)

    return settle_first


def _with_current(really: Callable[..., Any]) -> Callable[..., Any]:
    """`really`, which is given parameters that are current, and gradients as tensors of the script's own."""

    @functools.wraps(really)
    def call(*args: Any, **kwargs: Any) -> Any:
        return really(*guarded_params.current(args), **guarded_params.current(kwargs))

    return call


def _torch_function_with_current(bound: Any) -> Any:
    """A class's own `__torch_function__`, which may call torch's functions with those of other classes turned off."""
    really = bound.__func__

    @functools.wraps(really)
    def call(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA:
            args, kwargs = guarded_params.current(args), guarded_params.current(kwargs or {})
        return really(cls, func, types, args, kwargs)

    return classmethod(call)


def _apply_with_current(bound: Any) -> Any:
    """`autograd.Function.apply`, which is written in C++ from PyTorch 2.14 on, for the class that it is called on."""
    theirs = vars(torch.autograd.Function)["apply"]

    @functools.wraps(bound)
    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return theirs.__get__(None, cls)(*guarded_params.current(args), **guarded_params.current(kwargs))

    return classmethod(call)


class _Patch:
    """A function of ours that stands in the place of one of torch's, which calls it.

    Args:
        place: a module or a class.
        name: of the function there.
        ours_of: makes our function of torch's.
    """

    def __init__(self, place: Any, name: str, ours_of: Callable[[Callable[..., Any]], Any]) -> None:
        self.place, self.name, self.ours_of = place, name, ours_of
        self.there = vars(place)
        self.take_up()

    def take_up(self) -> None:
        """Make our function of the one that is there. A class may inherit that: `theirs` is None then."""
        self.theirs, self.ours = self.there.get(self.name), self.ours_of(getattr(self.place, self.name))


# Functorch's transforms wrap their arguments by the first ones. The others copy a tensor, or take over its memory, without
# calling any torch function. `torch.autograd` gives its function here the `grad_outputs` of others.
_PATCHES = [
    *(
        _Patch(module, name, _before)
        for module in (torch._functorch.eager_transforms, torch._functorch.vmap)
        for name in ("_wrap_for_grad", "_wrap_functional_tensor", "_add_batch_dim")
        if hasattr(module, name)
    ),
    *(
        _Patch(place, name, _with_current)
        for place, names in (
            (torch, ("tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_compressed_tensor")),
            (torch, ("sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor")),
            (torch.nested, ("nested_tensor",)),
            (torch.Tensor, ("new_tensor", "new", "set_", "as_subclass")),
            (torch.autograd, ("_tensor_or_tensors_to_tuple",)),
        )
        for name in names
    ),
    *(
        _Patch(place, name, lambda torchs: staticmethod(_with_current(torchs)))
        for place, name in ((torch.Tensor, "__new__"), (torch.Tensor, "_make_subclass"), (torch.autograd.Variable, "__new__"))
    ),
    # what a function saves for its backward pass must not change afterwards, even if its forward pass does not read it
    _Patch(torch.autograd.Function, "apply", _apply_with_current),
]
_known_classes = weakref.WeakSet[type]((torch.Tensor, PendingGradient))


def _find_tensor_classes() -> None:
    """Add a patch for each new tensor class that has its own `__torch_function__`, such as torch's nested tensors."""
    kinds: list[Any] = [torch.Tensor]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
        if kind not in _known_classes:
            _known_classes.add(kind)
            if isinstance(vars(kind).get("__torch_function__"), classmethod):
                _PATCHES.append(_Patch(kind, "__torch_function__", _torch_function_with_current))


def _put_patches() -> None:
    _find_tensor_classes()
    # one loop, since it runs in each step: a call for each patch takes as long as what the patch does
    for patch in _PATCHES:
        if patch.there.get(patch.name) is not patch.theirs:  # the script has put its own function there
            patch.take_up()
        setattr(patch.place, patch.name, patch.ours)


def _remove_patches() -> None:
    for patch in _PATCHES:
        if patch.there.get(patch.name) is not patch.ours:
            continue  # the script has put its own there meanwhile, which may call ours
        if patch.theirs is None:
            delattr(patch.place, patch.name)
        else:
            setattr(patch.place, patch.name, patch.theirs)


def before_leaving(owner: object, settle: Callable[[], None]) -> None:
    """Call `settle()` before each patched function runs, until `nothing_is_owed(owner)`.

    Args:
        owner: has deferred updates.
        settle: runs them.
    """
    if not _settlers:
        _put_patches()
    _settlers[id(owner)] = settle


def nothing_is_owed(owner: object) -> None:
    """Note that `owner` has no deferred updates any more: patched functions need not call it."""
    if _settlers.pop(id(owner), None) and not _settlers:  # compiled code must find torch's own functions
        _remove_patches()


def take_as_a_tensor(kind: type) -> None:
    """Let torch use the same kernels for tensors of a class of ours as for ordinary ones, as it does for DTensor.

    `clip_grad_norm_` would take norms one by one else, which have other bits on a GPU.
    """
    kinds: Any = getattr(foreach, "_foreach_supported_types", [])
    if kind not in kinds:
        kinds.append(kind)


def _settle_all() -> None:
    for settle in list(_settlers.values()):
        settle()


def watch_compiled_code(session: ReadByCompiledCode) -> None:
    """Tell `session` before each call of compiled code, until `unwatch_compiled_code(session)`.

    PyTorch has the function that is patched from 2.6 on. Before, only compiled modules are seen, by their hooks.
    """
    _read_by_compiled_code.add(session)
    really = getattr(dynamo, "_callback_from_stance", None)
    if really is None or getattr(really, "_of_gradlane", False):
        return

    @functools.wraps(really)
    def callback_from_stance(callback: Any) -> Any:
        if _read_by_compiled_code and callable(callback):
            _called(sys._getframe(1).f_locals.get("fn"))
        return really(callback)

    callback_from_stance._of_gradlane = True  # type: ignore[attr-defined]
    dynamo._callback_from_stance = callback_from_stance


def unwatch_compiled_code(session: ReadByCompiledCode) -> None:
    """`session` has ended."""
    _read_by_compiled_code.discard(session)


def _called(function: Any) -> None:
    """Compiled code of `function` is called: a module's own method, a step of an optimizer, or anything."""
    whose = getattr(function, "__self__", None)
    if isinstance(whose, torch.optim.Optimizer):
        return  # hooks on its step do what there is to do
    for session in list(_read_by_compiled_code):
        session.before_compiled_code(whose if isinstance(whose, torch.nn.Module) else None)


def patch_for_good() -> None:
    """Patch what a script may call at any time, once.

    `torch.jit.script` and `torch.jit.trace` take modules of a session, and copies of them, which have copies of the hooks. What
    they make is called with parameters that are current. A `Parameter` may be made of a parameter or gradient of a session.
    """
    really = torchscript.create_script_module
    if getattr(really, "_of_gradlane", False):
        return
    torch.nn.Parameter.__new__ = _made_of_current(torch.nn.Parameter.__new__)  # type: ignore[method-assign]
    torch.Tensor.data = _Data()  # type: ignore[assignment]
    for place, names in _READ_TENSORS:
        for name in names:
            setattr(place, name, _with_current(getattr(place, name)))

    @functools.wraps(really)
    def create_script_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        _settle_all()
        for param in module.parameters():
            guarded_params.use(param)
            outdated.check(param)
        with _without_hooks(module):
            return really(module, *args, **kwargs)  # type: ignore[no-untyped-call]

    create_script_module._of_gradlane = True  # type: ignore[attr-defined]
    torchscript.create_script_module = create_script_module  # type: ignore[assignment]


_COLLECTIVES: tuple[str, ...] = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "scatter", "gather", "send"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "recv", "recv_anysource"),
)
"""Methods of a process group, some of them of newer versions of torch. Most write to tensors that they are given, too."""

# these read the memory of the tensors that they are given, without calling any torch function
_READ_TENSORS: list[tuple[Any, Sequence[str]]] = [
    (torch._C.ScriptFunction, ("__call__",)),
    (torch._C.ScriptMethod, ("__call__",)),
    (torch, ("to_dlpack",)),
    (torch.utils.dlpack, ("to_dlpack",)),
    *(
        [
            (torch.distributed.ProcessGroup, [name for name in _COLLECTIVES if hasattr(torch.distributed.ProcessGroup, name)]),
            (torch.distributed, ("_broadcast_coalesced",)),
        ]
        if torch.distributed.is_available()
        else []
    ),
]


class _Data:
    """Torch's attribute `data`, which asks the tensor that gets other memory for its class, but not the one that has it."""

    def __init__(self) -> None:
        self._get, self._set = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
        self.__dict__.update(__get__=self._get, __set__=self._set)  # a class with torch functions of its own compares these

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return self if tensor is None else self._get(tensor)

    def __set__(self, tensor: Any, value: Any) -> None:
        self._set(tensor, guarded_params.current(value))


def _made_of_current(really: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(really)
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        return really(cls, guarded_params.current(data), requires_grad)  # torch looks at the class of what it is given

    return new


@contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for part in module.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            if any(isinstance(hook, Hook) for hook in hooks.values()):
                taken.append((hooks, dict(hooks)))
                for key in [key for key, hook in hooks.items() if isinstance(hook, Hook)]:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)
