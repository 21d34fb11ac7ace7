"""ProcessGroups: the process groups of torch.distributed that a session makes for itself, and how
they end.

After a failure some sums never end, because they wait for ranks that are gone. torch.distributed
calls their callbacks on its own threads. If such a thread calls Python while the interpreter is
being finalised, the process dies by SIGABRT and not with the script's exit code. So at exit the
connections of unfinished sums are shut down first, which ends those sums.

A group is destroyed only when torch.distributed has let go of every callback. Its thread takes the GIL for that, and some
releases hold the GIL while they wait for the thread.
"""

from __future__ import annotations

import atexit
import contextlib
import operator
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _autograd

from gradlane.live.backends import calls
from gradlane.live.backends.sockets import Sockets, open_sockets, shut_down
from gradlane.live.torch_versions import new_process_group

Begun = TypeVar("Begun")


def is_gloo(group: Any, device: torch.device) -> bool:
    """Whether Gloo carries what `group` does with tensors on `device`."""
    try:
        # a group that was made without a backend's name has one for each device, and no name itself
        return str(group._get_backend(device).name()) == "gloo"
    except RuntimeError:  # it has none for the device, or is carried by another class in Python
        return False


def is_by_host(group: Any, device: torch.device) -> bool:
    """Whether the host carries out what `group` does with tensors on `device`; NCCL's takes its turn in a stream."""
    return device.type == "cpu" or is_gloo(group, device)


def unrecorded(begin: Callable[..., Begun], *args: Any) -> Begun:
    """Call `begin(*args)`, which begins collectives that may end after this call, out of sight of torch's profilers.

    Gloo's thread writes the end of a collective into the record of the profiler that ran at its begin. If that profiler has
    stopped, as at the end of each step that a script profiles, its memory is another's. PyTorch 2.13 then writes a thread's
    number into whatever is there.
    """
    if not _autograd._profiler_enabled():
        return begin(*args)
    _autograd._enable_record_function(False)
    try:
        return begin(*args)
    finally:
        _autograd._enable_record_function(True)


all_reduce = dist.ProcessGroup.allreduce
"""Torch's own function. What stands in its place later looks for parameters in each call (`torch_patches.py`)."""

_END_S = 5.0  # for sums to end once their connections are shut down, and for callbacks


OnEnd = Callable[[BaseException | None], None]
_is_completed = operator.methodcaller("is_completed")


class UnderWay:
    """Collectives that were begun together in some groups and have not ended, as far as anybody was told.

    To be told of an end costs a turn at the interpreter's lock, on a thread of torch.distributed:
    50 to 100 us, most of which the training thread waits too. Whoever can look now and then saves
    it.

    Args:
        groups: are closed only when torch has let go of the callback.
        works: what torch.distributed returned for them, of collectives on CPU tensors.
        callback: called once, with None, or with the error of a work that failed; not before `tell` or `tell_if_ended` was
            called. On a thread of torch.distributed, unless they have ended by then.
    """

    def __init__(self, groups: ProcessGroups, works: Sequence[Any], callback: OnEnd) -> None:
        self._groups, self._works, self._callback = groups, works, callback
        self.is_to_tell = False
        """Whether `tell` was called."""
        groups.under_way.add(self)

    def tell_if_ended(self) -> bool:
        """If all have ended by now, call the callback, unless `tell` was called; return whether they have. Does not wait."""
        if not all(map(_is_completed, self._works)):
            return False
        if not self.is_to_tell:
            self.is_to_tell = True
            self._conclude(self._works)
            self._groups.under_way.discard(self)  # no thread waits for this one: it has no callback
        return True

    def tell(self) -> None:
        """Call the callback: from within this call if all have ended, else when they have."""
        if self.is_to_tell or self.tell_if_ended():  # a callback that torch calls at once takes longer
            return
        self.is_to_tell = True
        futures = [work.get_future() for work in self._works]
        (futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)).add_done_callback(
            _Once(lambda future: self._conclude([future]), lambda: self._groups.let_go_of(self))
        )

    def _conclude(self, ended: Sequence[Any]) -> None:
        try:
            for each in ended:
                each.wait()
        except Exception as error:
            # its frames would keep torch's hold on this callback, whose end `close` and `_end` wait for
            self._callback(error.with_traceback(None))
        else:
            self._callback(None)


class _Once:
    """A future's callback; `after` is called when the future has let go of it."""

    def __init__(self, call: Callable[[Any], None], after: Callable[[], None]) -> None:
        self._call, self._after = call, after

    def __call__(self, future: Any) -> None:
        self._call(future)

    def __del__(self) -> None:
        self._after()


class NewGroups:
    """Makes the process groups of one session, over the ranks of another group or some of them.

    Args:
        like: the group whose ranks they are; None for the default group.
        store: of torch.distributed, where only this session writes; also an attribute.
        name: of the session, the same on all ranks, which no other session of this process has.
    """

    def __init__(self, like: Any, store: Any, name: str) -> None:
        self.store = store
        self._like, self._name, self._made = like, f"gradlane-{name}", 0

    def make(self, timeout_s: float, backend: str | None = None, members: Sequence[int] | None = None) -> Any:
        """Make one (collective; every rank makes the same ones in the same order).

        Args:
            timeout_s: seconds after which torch.distributed fails a collective in it.
            backend: torch's name; None for the same as the group whose ranks it has.
            members: ranks of that group, this process among them; None for all. Groups that ranks make
                at the same time have no rank in common.
        """
        name = f"{self._name}-{self._made}" + ("" if members is None else f"-of-{members[0]}")
        self._made += 1
        return new_process_group(self._like, self.store, name, timedelta(seconds=timeout_s), backend, members)

    def make_for_cpu(self, timeout_s: float) -> Any:
        """As `make`, for tensors in CPU memory, which the job's own backend may not take, as NCCL does not."""
        like: Any = dist.group.WORLD if self._like is None else self._like
        return self.make(timeout_s, None if torch.device("cpu") in like._device_types else "gloo")


class ProcessGroups:
    """A list of process groups, in the order in which they were opened.

    Args:
        new_groups: makes them.
        timeout_s: seconds after which torch.distributed fails a collective in them.

    Attributes:
        under_way: collectives in these groups that have not ended, or whose callback torch still has.
    """

    def __init__(self, new_groups: NewGroups, timeout_s: float) -> None:
        self._new_groups, self._timeout_s = new_groups, timeout_s
        self._all: list[Any] = []
        self._sockets: list[Sockets] = []
        self._before: Sockets | None = None  # this process's sockets before the group that is being opened
        self.is_aborted = False
        self._changed = threading.Condition()
        self.under_way: set[UnderWay] = set()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Any:
        return self._all[index]

    def open(self, members: Sequence[int] | None = None) -> None:
        """Open one more group (collective); `members` as for `NewGroups.make`."""
        if not self._all:
            atexit.register(self._end)
        self._before = open_sockets()
        self._all.append(self._new_groups.make(self._timeout_s, members=members))
        self._sockets.append(open_sockets() - self._before)
        self._before = None

    def abort(self) -> None:
        """End all collectives in the groups, on a thread of its own: what waits for them goes on, without a result.

        torch.distributed would wait for its own timeout and then end the process.
        """
        if self.is_aborted:
            return
        self.is_aborted = True

        def end() -> None:
            for group in self._all:
                with contextlib.suppress(RuntimeError, AttributeError):  # before PyTorch 2.6 groups have no `abort`
                    group.abort()

        threading.Thread(target=end, name="gradlane-abort", daemon=True).start()

    def sockets(self, index: int) -> Sockets:
        """The sockets that this process gained while group `index` was made: its connections are
        among them.
        """
        return self._sockets[index]

    def when_ended(self, works: Sequence[Any], callback: OnEnd) -> None:
        """Call `callback` once all `works` have ended, see `UnderWay`."""
        UnderWay(self, works, callback).tell()

    def let_go_of(self, begun: UnderWay) -> None:
        """Collectives have ended, and torch has let go of their callback."""
        with self._changed:
            self.under_way.discard(begun)
            self._changed.notify_all()

    def close(self) -> None:
        """Destroy the groups; no collective may be in flight."""
        atexit.unregister(self._end)
        with self._changed:
            self._changed.wait_for(lambda: not any(begun.is_to_tell for begun in list(self.under_way)), _END_S)
        for group in self._all:
            # at exit the script may already have destroyed all groups
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)
        self._all.clear()

    def _end(self) -> None:
        """At exit, unless `close` was called: end the sums and calls that are stuck, then close."""
        if not self.under_way and not calls.some_are_left():
            return
        now = open_sockets()
        opening = frozenset() if self._before is None else now - self._before
        for fd, _ in opening.union(*self._sockets) & now:
            shut_down(fd)
        with self._changed:
            for begun in list(self.under_way):
                begun.tell()
            are_over = self._changed.wait_for(lambda: not self.under_way, _END_S)
        if are_over and not calls.some_are_left():
            self.close()  # this also ends the threads that run the callbacks
