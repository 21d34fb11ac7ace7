"""Buffers of the model (running statistics and the like), kept as DDP keeps them: rank 0's, at each forward.

DDP broadcasts at the start of a forward pass and waits for it there. That is done here too at first, and for as long
as rank 0's script changes buffers between its forward passes. Where it does not, rank 0's buffers leave at the end of
the forward pass that wrote them, hidden behind backward, and are taken over at the start of the next: same values, no
wait.

A script may change buffers all the same. Rank 0 compares what it has at the start of a forward pass with what it sent;
where it differs, it announces over the control channel that it sends its buffers `AGAIN`, for the same forward pass,
and does so in a process group of its own. A rank whose script has changed a buffer too waits until it knows whether
they come again. One whose script has not goes on, as a script that runs alike on all ranks permits; if other values
then come for a forward pass that has begun, the job ends with an error that says so. In the same way rank 0 sends its
buffers `TO_EVALUATE` when it evaluates, for ranks that evaluate too.

On a device, where the host would have to wait to read what came, all are sent as DDP sends them, at the start of the
next forward pass of whatever kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from gradlane.errors import UnsupportedError
from gradlane.live.backends.process_groups import ProcessGroups

_ALIGN = 16
_HEADER = 2 * _ALIGN  # bytes of a message before its buffers, which hold what `_Message.say` is told
_REGULAR, _ANNOUNCED = range(2)  # process groups

WaitUntil = Callable[[Callable[[], bool], str], None]
Announce = Callable[[int, int], None]


class Extra(IntEnum):
    """Why rank 0 sends its buffers out of turn."""

    AGAIN = 0
    TO_EVALUATE = 1


class _Message:
    """One broadcast: its bytes, and the buffers' places in them."""

    def __init__(self, buffers: Sequence[torch.Tensor], layout: list[int] | None = None) -> None:
        offsets, end = [], _HEADER
        for buffer in buffers:
            offsets.append(end)
            end += -(-buffer.numel() * buffer.element_size() // _ALIGN) * _ALIGN
        self.bytes = torch.zeros(end, dtype=torch.uint8, device=buffers[0].device)
        self.layout = offsets if layout is None else layout  # one object for all messages that are laid out alike
        self.values = [
            self.bytes[start : start + buffer.numel() * buffer.element_size()].view(buffer.dtype).view(buffer.shape)
            for start, buffer in zip(offsets, buffers, strict=True)
        ]
        self._header = self.bytes[:_HEADER].view(torch.int64)
        self.ended = True
        self.must_come = True  # else it may be that rank 0 never sends it
        self.work: Any = None

    def say(self, next_at_end: bool, again: int, evaluated: int) -> None:
        """next_at_end: whether the next regular broadcast comes at the end of this forward pass. again: how many were sent
        AGAIN so far. evaluated: for which forward pass the last was sent TO_EVALUATE; -1 for none.
        """
        self._header[0], self._header[1], self._header[2] = next_at_end, again, evaluated

    @property
    def next_at_end(self) -> bool:
        return bool(self._header[0])

    @property
    def again(self) -> int:
        return int(self._header[1])

    @property
    def evaluated(self) -> int:
        return int(self._header[2])

    def alike(self) -> _Message:
        """Another, of the same layout."""
        return _Message(self.values, self.layout)

    def fill(self, buffers: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.values, list(buffers))

    def same_values(self, other: _Message) -> bool:
        return torch.equal(self.bytes[_HEADER:], other.bytes[_HEADER:])


def _versions_of(buffers: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Identity and version of each: equal where a script assigned and changed none."""
    return [(id(buffer), buffer._version) for buffer in buffers]


def places_of_buffers(model: torch.nn.Module) -> tuple[list[tuple[dict[str, torch.Tensor | None], str]], list[str]]:
    """Where each buffer of `model` is, each once, and what it is called: for `BufferSync`."""
    owners, names, seen = [], [], set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                owners.append((module._buffers, name))
                names.append(f"{prefix}.{name}" if prefix else name)
    return owners, names


class BufferSync:
    """Owned by a session; used on the training thread. `announced` comes on the control channel's, and what ended is told
    on threads of torch.distributed.

    owners: where each buffer is: a module's dictionary of buffers and the name in it, since a script may assign another
    tensor at any time. names: for messages. always_at_start: as DDP does, whatever the script does. has_channel: whether
    rank 0 can announce what it sends out of turn; without, broadcasts are as on a device.
    """

    def __init__(
        self,
        owners: Sequence[tuple[dict[str, torch.Tensor | None], str]],
        names: Sequence[str],
        group: Any,
        rank: int,
        timeout_s: float,
        always_at_start: bool,
        has_channel: bool = True,
    ) -> None:
        self._owners, self._names, self._rank = owners, names, rank
        self._groups = ProcessGroups(group, timeout_s)
        buffers = [owner[name] for owner, name in owners]
        self._lay_out([buffer for buffer in buffers if buffer is not None])
        self._on_cpu = self._last.bytes.device.type == "cpu"
        self._announces = self._on_cpu and has_channel
        for _ in range(1 + self._announces):
            self._groups.open()
        self._may_be_early = not always_at_start and self._announces
        self._at_end = False  # whether regular broadcasts come at the end of forward passes, on all ranks alike
        self._ended = 0  # forward passes after which buffers are due; what is sent then is for the one that follows
        self._due_to_train = self._due_to_evaluate = True
        self._regular: deque[_Message] = deque()  # under way: rank 0's, or the next that another rank has asked for
        self._extras: deque[tuple[int, Extra, _Message]] = deque()  # announced: for which forward pass, and why
        self._again = 0  # of rank 0: how many it has sent; elsewhere: how many have been dealt with
        self._sent_to_evaluate = -1  # for which forward pass the last one of these was
        self._evaluated: tuple[int, _Message | None] = (-1, None)  # for which forward pass, and with what
        self._versions: list[tuple[int, int]] = []  # of the buffers after the last forward pass
        self._script_changes = False  # rank 0's script has changed one between two forward passes
        self._closed = False
        self._announce: Announce = lambda forward, extra: None
        self._notify: Callable[[BaseException | None], None] = lambda error: None

    def connect(self, announce: Announce, notify: Callable[[BaseException | None], None]) -> None:
        """How rank 0 tells all others what will come, and whom to tell that a broadcast ended, on whatever thread."""
        self._announce, self._notify = announce, notify

    def _buffers(self, converted: bool = False) -> list[torch.Tensor]:
        """converted: of another dtype will do, as in a model that is evaluated in half precision for a while."""
        found: list[torch.Tensor] = []
        others = []
        for (owner, name), dtype, shape in zip(self._owners, self._dtypes, self._shapes, strict=True):
            buffer = owner.get(name)
            if buffer is None or buffer.shape != shape or (buffer.dtype != dtype and not converted):
                others.append(len(found))
            found.append(torch.empty(0) if buffer is None else buffer)
        if not others:
            return found
        first = found[others[0]]
        if self._at_end or self._owners[others[0]][0].get(self._owners[others[0]][1]) is None:
            raise UnsupportedError(
                f"buffer {self._names[others[0]]} is gone, or {first.dtype} of shape {tuple(first.shape)} now, and was another "
                "before: pass broadcast_buffers='forward' to gradlane.attach, or close() the session and attach again"
            )
        self._lay_out(found)  # as where observers of a quantised model learn how many channels there are
        return found

    def _lay_out(self, buffers: Sequence[torch.Tensor]) -> None:
        self._dtypes, self._shapes = [buffer.dtype for buffer in buffers], [buffer.shape for buffer in buffers]
        # rank 0: what it had when the last forward pass ended; elsewhere: what the last forward pass was begun with
        self._last = _Message(buffers)
        self._idle: list[_Message] = []  # on rank 0: laid out as `_last` is, and not on their way

    # -- forward passes ------------------------------------------------------------------------------------------

    def before_forward(self, wait_until: WaitUntil, trains: bool, settled: bool) -> None:
        """Take over what rank 0 has, where DDP would. settled: buffers may leave early from now on."""
        regular = trains or not self._announces
        is_due = self._due_to_train if regular else self._due_to_evaluate
        self._due_to_evaluate = False
        if regular:
            self._due_to_train = False
        if not is_due:
            return
        if self._rank == 0:
            self._tell(wait_until, regular, settled)
        else:
            self._listen(wait_until, regular)

    def after_forward(self) -> None:
        """A forward pass has ended after which DDP would broadcast rank 0's buffers."""
        self._due_to_train = self._due_to_evaluate = True
        self._ended += 1
        buffers = self._buffers()
        if self._rank == 0 and self._may_be_early:
            self._last.fill(buffers)
        if self._at_end:
            if self._rank == 0:
                self._regular.append(self._send(_REGULAR, buffers))
            else:
                if self._regular and self._regular[0] is self._last:  # this forward pass was one in evaluation mode
                    self._regular.popleft()
                self._ask()
                self._regular[0].must_come = True
        self._versions = _versions_of(buffers)

    def _tell(self, wait_until: WaitUntil, regular: bool, settled: bool) -> None:
        while self._regular:
            message = self._wait(self._regular.popleft(), wait_until)
            if message.layout is self._last.layout:  # else the buffers had other shapes when it was sent
                self._idle.append(message)
        buffers = self._buffers(converted=not regular)
        while self._extras and self._extras[0][2].ended:
            self._extras.popleft()
        if not regular:
            self._sent_to_evaluate = self._ended
            self._send_extra(Extra.TO_EVALUATE, buffers)
            return
        changed = self._may_be_early and self._ended > 0 and self._has_changed(buffers)
        if not self._at_end:
            self._script_changes |= changed
            self._at_end = settled and self._may_be_early and not self._script_changes
            self._regular.append(self._send(_REGULAR, buffers))
        elif changed:
            self._again += 1
            self._send_extra(Extra.AGAIN, buffers)

    def _has_changed(self, buffers: Sequence[torch.Tensor]) -> bool:
        """Whether rank 0's values are others than when the last forward pass ended: `.data` and NumPy change no version, and
        averages that were swapped in for an evaluation and out again leave all as it was."""
        now = self._filled(buffers)
        self._idle.append(now)
        return not now.same_values(self._last)

    def _listen(self, wait_until: WaitUntil, regular: bool) -> None:
        self._ask(must_come=regular)  # where all only evaluate, it never does
        if regular:
            self._regular[0].must_come = True
        if self._at_end:
            changed = _versions_of(self._buffers(converted=not regular)) != self._versions
            sent_at_end = self._wait(self._regular[0], wait_until)
            self._check(sent_at_end, wait_until)
            self._last = sent_at_end
        else:
            while self._extras and self._extras[0][0] < self._ended and self._extras[0][2].ended:
                self._take_extra()
        if not regular:
            self._take_over_to_evaluate(wait_until, wait=not self._at_end or changed)
            return
        regularly_sent = self._wait(self._regular.popleft(), wait_until)
        if not self._at_end:
            self._at_end = self._may_be_early and regularly_sent.next_at_end  # which is not read on a device
            self._last = regularly_sent
        elif changed:  # unless they come again before rank 0 has ended this forward pass, they do not
            self._ask(must_come=False)
            wait_until(lambda: self._regular[0].ended or self._extra(Extra.AGAIN) is not None, "rank 0's buffers")
            if self._regular[0].ended and self._regular[0].again > self._again:  # they do, and came by another way
                wait_until(lambda: self._extra(Extra.AGAIN) is not None, "rank 0's buffers")
        self._last = self._extra(Extra.AGAIN) or self._last
        if not self._is_taken_over_already():
            self._take_over(self._last)

    def _take_over_to_evaluate(self, wait_until: WaitUntil, wait: bool) -> None:
        """wait: until it is known whether rank 0 evaluates too, or goes on to train."""
        if wait:
            self._ask(ahead=self._at_end, must_come=False)
            wait_until(lambda: self._regular[-1].ended or self._extra(Extra.TO_EVALUATE) is not None, "rank 0's buffers")
            if self._regular[-1].ended and self._regular[-1].evaluated == self._ended:  # it did, and trains already
                wait_until(lambda: self._extra(Extra.TO_EVALUATE) is not None, "rank 0's buffers")
        message = self._extra(Extra.TO_EVALUATE) or (self._last if self._at_end else self._regular[0])
        self._evaluated = self._ended, message
        self._take_over(message, converted=True)

    def _is_taken_over_already(self) -> bool:
        """Where all ranks evaluate between two forward passes that train, DDP broadcasts then, and not a second time."""
        return self._evaluated[0] == self._ended and self._extra(Extra.TO_EVALUATE) is not None

    def _extra(self, kind: Extra) -> _Message | None:
        """What has come out of turn for the forward pass that begins, if anything."""
        for forward, of_kind, message in list(self._extras):
            if forward == self._ended and of_kind is kind and message.ended:
                return message
        return None

    def check(self, wait_until: WaitUntil) -> None:
        """Raise `UnsupportedError` if the last forward pass used a value that rank 0 had changed; before what came of it is
        used. What tells has left rank 0 at the end of its own forward pass."""
        if self._rank and self._at_end and self._regular and self._regular[0].must_come:
            self._check(self._wait(self._regular[0], wait_until), wait_until)

    def _check(self, told: _Message, wait_until: WaitUntil) -> None:
        """Whether whatever ended before this forward pass had been begun with rank 0's values. told: a regular broadcast, which
        tells what rank 0 had sent out of turn by then.
        """
        evaluated = False
        while (
            self._again < told.again
            or self._sent_to_evaluate < told.evaluated
            or (self._extras and self._extras[0][0] < self._ended)
        ):
            wait_until(lambda: len(self._extras) > 0 and self._extras[0][2].ended, "rank 0's buffers")
            forward, kind, message = self._take_extra()
            used: _Message | None = self._last
            if kind is Extra.TO_EVALUATE:
                evaluated = self._evaluated[0] == forward
                used = self._evaluated[1] if evaluated else None
            elif evaluated:  # then DDP would not have sent them
                continue
            if used is not None and not message.same_values(used):
                raise UnsupportedError(
                    "rank 0 alone changed a buffer of the model between two forward passes, and others had gone on with its "
                    "value before: pass broadcast_buffers='forward' to gradlane.attach, which waits there as DDP does"
                )

    def _take_extra(self) -> tuple[int, Extra, _Message]:
        forward, kind, message = self._extras.popleft()
        if kind is Extra.AGAIN:
            self._again += 1
        else:
            self._sent_to_evaluate = forward
        return forward, kind, message

    # -- broadcasts ----------------------------------------------------------------------------------------------

    def _send(self, group: int, buffers: Sequence[torch.Tensor]) -> _Message:
        message = self._filled(buffers)
        message.say(self._at_end, self._again, self._sent_to_evaluate)
        return self._start(message, group)

    def _filled(self, buffers: Sequence[torch.Tensor]) -> _Message:
        message = self._idle.pop() if self._idle else self._last.alike()
        message.fill(buffers)
        return message

    def _send_extra(self, extra: Extra, buffers: Sequence[torch.Tensor]) -> None:
        self._announce(self._ended, extra)
        self._extras.append((self._ended, extra, self._send(_ANNOUNCED, buffers)))

    def announced(self, forward: int, extra: int) -> None:
        """Rank 0 sends its buffers out of turn, for the forward pass that follows the first `forward`."""
        if self._closed:
            return
        message = self._last.alike()
        self._extras.append((forward, Extra(extra), message))
        self._start(message, _ANNOUNCED)

    def _ask(self, ahead: bool = False, must_come: bool = True) -> None:
        if len(self._regular) < 1 + ahead:
            message = self._last.alike()
            message.must_come = must_come
            self._regular.append(self._start(message, _REGULAR))

    def _start(self, message: _Message, group: int) -> _Message:
        message.ended = False
        message.work = dist.broadcast(message.bytes, group_src=0, group=self._groups[group], async_op=True)
        if self._on_cpu:

            def end(error: BaseException | None) -> None:
                message.ended = error is None
                # what rank 0 sends out of turn may be on its way when another rank has left in order
                matters = message.must_come and not (self._rank == 0 and group == _ANNOUNCED)
                self._notify(error if matters else None)

            self._groups.when_ended([message.work], end)
        return message

    def _wait(self, message: _Message, wait_until: WaitUntil) -> _Message:
        if self._on_cpu:
            if not message.ended:
                wait_until(lambda: message.ended, "the broadcast of the model's buffers")
        elif message.work is not None:
            message.work.wait()  # the stream waits, the host does not
        message.work = None
        return message

    def _take_over(self, message: _Message, converted: bool = False) -> None:
        # past the version counters, as DDP writes them: another forward pass may still be waiting for its backward pass
        torch._foreach_copy_([buffer.data for buffer in self._buffers(converted)], message.values)

    def finish(self, wait_until: WaitUntil) -> None:
        """Wait for the broadcasts under way."""
        self.check(wait_until)
        for message in self._regular:
            if message.must_come:
                self._wait(message, wait_until)

    def close(self) -> None:
        """Give the process groups back, unless something is on its way in them to a rank that has left."""
        self._closed = True
        extras = [message for _, _, message in list(self._extras)]
        if all(message.ended for message in (*self._regular, *extras)):
            self._groups.close()
