"""Gives a guarded parameter to every function of torch, and prints those that read it past its guard.

    python -m tests.live.past_guards

A function is given it at several places among other arguments, in a process that it may end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad
import torch.masked
import torch.nested
import torch.utils.dlpack

from gradlane.live.session import guarded_params, torch_patches
from gradlane.live.session.tracked import Tracked

_LIMIT_S, _AT_ONCE = 20, 20
_PLACES: list[Any] = [
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch._C._nn,
    torch.linalg,
    torch.fft,
    torch.special,
    torch.sparse,
    torch.nested,
    torch.masked,
    torch.autograd,
    torch.autograd.forward_ad,
    torch.nn.utils,
    torch.nn.utils.rnn,
    torch.nn.init,
    torch.func,
    torch.utils.dlpack,
]
# these write files, wait, or change what the others find
_LEFT_OUT = {
    "save",
    "load",
    "from_file",
    "fork",
    "wait",
    "compile",
    "import_ir_module",
    "__init_subclass__",
    "__subclasshook__",
}


class _MadeCurrentError(Exception):
    """The guard was asked."""


class _Own(torch.Tensor):
    """A class of a script's."""


def _ask(*_: Any) -> None:
    raise _MadeCurrentError


def _arguments(value: float) -> Iterator[tuple[Any, ...]]:
    rows, two = torch.tensor([[0, 1]]), torch.tensor([0, 1])
    for shape in ((2, 2), (2,), ()):
        param, other = torch.nn.Parameter(torch.full(shape, value)), torch.full(shape, 0.5)
        guarded_params.watch((Tracked("param", param, 0),), _ask)
        yield (param,)
        yield ([param],)
        yield [param, param], 0
        yield other, param
        yield param, other
        yield param, 0
        yield param, _Own
        yield param, torch.float64
        yield _Own, param
        yield other, 0, param
        yield other, other, param
        yield other, other, other, param
        yield other, [param]
        yield [other], [param]
        yield other, two, param
        yield two, two, param
        yield rows, param
        yield rows, param, (2, *shape[1:])
        yield torch.abs, param


def _values_in(value: Any) -> Any:
    """What shows the memory of a parameter in `value`; a parameter that is still guarded shows nothing."""
    if isinstance(value, (list, tuple)):
        return [_values_in(item) for item in value]
    if isinstance(value, torch.Tensor):
        return None if guarded_params.is_watched(value) else _list_of(value.detach().as_subclass(torch.Tensor))  # type: ignore[arg-type]
    if type(value).__name__ == "PyCapsule":
        return torch.from_dlpack(value).tolist()
    return value if isinstance(value, (float, complex, bytes)) else None


def _list_of(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).tolist()


def _results(function: Callable[..., Any], value: float) -> list[Any]:
    found = []
    for arguments in _arguments(value):
        torch.manual_seed(0)
        try:
            found.append(_values_in(function(*arguments)))
        except BaseException:  # it asked, or takes other arguments
            found.append(None)
    return found


def _read_by(function: Callable[..., Any]) -> bool:
    """Whether what `function` returns depends on the value of a guarded parameter."""
    return _results(function, 0.25) != _results(function, 0.75)


def _those_that_read(functions: Sequence[tuple[str, Callable[..., Any]]]) -> list[str]:
    """Their names; in a process of its own, and where that ends, in one for each function."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(_LIMIT_S)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        with os.fdopen(writes, "w") as answer:
            json.dump([name for name, function in functions if _read_by(function)], answer)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        told = answer.read()
    ended_in_order = os.waitpid(child, 0)[1] == 0
    if ended_in_order:
        return list(json.loads(told))
    if len(functions) == 1:
        print(f"{functions[0][0]} ends its process, or takes too long", file=sys.stderr)
        return []
    return [name for one in functions for name in _those_that_read([one])]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # what is forked has no other threads
    torch_patches.patch_for_good()
    torch_patches.before_leaving(main, _ask)
    functions = [
        (f"{place.__name__}.{name}", function)
        for place in _PLACES
        for name in sorted(dir(place))
        if callable(function := getattr(place, name, None))
        and name not in _LEFT_OUT
        and not isinstance(function, types.ModuleType)
    ]
    found = [
        name for first in range(0, len(functions), _AT_ONCE) for name in _those_that_read(functions[first : first + _AT_ONCE])
    ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
