"""What differs between the releases of PyTorch that a live session runs on: 2.4 and newer.

Functions have the names that the newest release gives them. docs/versions.md says what was run on
which release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlane.errors import UnsupportedError

RELEASE: tuple[int, int] = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))  # type: ignore[assignment]
NEWEST_TESTED = (2, 15)
"""The newest release on which the tests of sessions were run."""

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

KEEPS_WORKS = RELEASE >= (2, 7)
"""Whether C++ that calls a process group written in Python keeps the Python half of the work that
it gets. Older releases drop it at once, and the work's `wait()` in C++ then never returns.
"""


def broadcast_from(rank: int, tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
    """torch.distributed's `broadcast` from a rank of `group`, which has another number in the default
    group; before PyTorch 2.6 it takes no other.

    Args:
        rank: in `group`, of the one that sends.
        tensor: to send or to receive.
        group: the ranks; None for the default group.
        async_op: return a work at once rather than wait.
    """
    return dist.broadcast(tensor, global_ranks(group)[rank], group, async_op)


def global_ranks(group: Any) -> list[int]:
    """The ranks of `group` in its order, as the default group numbers them.

    Args:
        group: this process is in it; None for the default group, which releases before 2.5 do not take.
    """
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def timeout_of(group: Any) -> float:
    """Seconds after which torch.distributed gives up a collective of `group`; torch's default where it does not say.

    Args:
        group: this process is in it; None for the default group.
    """
    c10d: Any = dist.distributed_c10d
    made = c10d._get_default_group() if group is None else group
    for device in made._device_types:
        try:
            backend = made._get_backend(device)
            own: float | None = getattr(backend, "_timeout_s", None)  # gradlane's, which is written in Python
            return float(backend.options._timeout.total_seconds()) if own is None else own
        except (AttributeError, RuntimeError):  # another one in Python, or none for that device
            continue
    return float(c10d.default_pg_timeout.total_seconds())


def new_process_group(
    like: Any, store: Any, name: str, timeout: timedelta, backend: str | None = None, members: Sequence[int] | None = None
) -> Any:
    """A process group of torch.distributed over ranks of another (collective over these ranks).

    `torch.distributed.new_group` has to be called by all ranks of the job, or gives two groups of
    the same ranks one name. It meets in the default group's store, where it may find what an
    earlier attempt of the job has written.

    Args:
        like: whose ranks; None for the default group.
        store: for this group alone.
        name: that no other group of this process has; the same on all ranks.
        timeout: of its collectives.
        backend: of the new group; None for that of `like`.
        members: ranks of `like`, this process among them; None for all.
    """
    c10d: Any = dist.distributed_c10d
    rank, ranks = dist.get_rank(like), global_ranks(like)
    if members is not None:
        rank, ranks = members.index(rank), [ranks[member] for member in members]
    kind, choices = c10d.Backend(backend or dist.get_backend(like)), None
    if kind.startswith("nccl"):  # from 2.15 on also "nccl2" and "nccl-legacy", which take the same options
        choices = _nccl_options(like, timeout)
        timeout = choices._timeout
    # by position: the seventh parameter has another name before PyTorch 2.6
    made, _ = c10d._new_process_group_helper(
        len(ranks), rank, ranks, kind, store, name, choices, timeout=timeout,
        device_id=c10d._get_default_group().bound_device_id,
    )  # fmt: skip
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _nccl_options(like: Any, timeout: timedelta) -> Any:
    """NCCL's options for a session's group: a stream that goes before those that compute, and otherwise the script's own
    choices for `like` (CTAs, traffic class).

    At its timeout NCCL's watchdog ends the process, so that it is no shorter than that of `like`. A rank that is gone is
    noticed by the control channel.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    group: Any = dist.group.WORLD if like is None else like
    theirs: Any = getattr(group._get_backend(torch.device("cuda")), "options", None)
    options._timeout = max(timeout, getattr(theirs, "_timeout", timeout))
    if hasattr(theirs, "config"):
        options.config = theirs.config
    return options


def is_exporting() -> bool:
    """Whether `torch.export` records what is called now."""
    of_newer: Callable[[], bool] | None = getattr(torch.compiler, "is_exporting", None)
    # before 2.7 torch.export sets this flag and nothing else does
    return of_newer() if of_newer is not None else bool(torch.compiler._is_compiling_flag)


def keeps_graph() -> bool:
    """Whether the running backward pass keeps its graph for another one; True where torch cannot
    tell, before 2.5.
    """
    of_newer: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return of_newer is None or of_newer()


def why_untested(release: tuple[int, int] = RELEASE) -> str | None:
    """What to tell a user whose PyTorch is newer than any that was tested; None where it is not.

    A session relies on functions of torch that no release promises to keep.

    Args:
        release: major and minor number.
    """
    if release <= NEWEST_TESTED:
        return None
    theirs, tested = (".".join(map(str, each)) for each in (release, NEWEST_TESTED))
    return (
        f"PyTorch {theirs} is newer than {tested}, the newest release that gradlane was tested with; train a few steps with "
        "verify=True (--verify), which compares them with DDP"
    )


def require_release(least: tuple[int, int], what: str) -> None:
    """Raise `UnsupportedError` unless PyTorch has release `least` or a newer one.

    Args:
        least: major and minor number.
        what: needs it; the beginning of the message.
    """
    if least > RELEASE:
        raise UnsupportedError(
            f"{what}: got PyTorch {torch.__version__}, expected {'.'.join(map(str, least))} or newer; install a newer release"
        )
