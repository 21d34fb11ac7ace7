"""BufferSync: the model's buffers (running statistics and the like), kept equal to rank 0's.

DDP broadcasts rank 0's buffers at the start of a forward pass and waits for them there. A session
does so too at first, and for as long as rank 0's script changes buffers between its forward passes.
If the script changes none, rank 0 sends its buffers at the end of the forward pass that wrote them,
so that the broadcast overlaps with the backward pass.

A script may change a buffer later all the same. So rank 0 compares its buffers with those that it sent, at the start of each
forward pass that trains. It says over the control channel whether they hold (`REGULAR`) or come `AGAIN`, in a second process
group. The other ranks wait for that word, where under DDP they would wait for the buffers.

Rank 0 announces and sends its buffers too when it evaluates (`TO_EVALUATE`). A rank that evaluates
waits until it knows whether rank 0 does, or has gone on to train.

An error that leaves a forward pass changes nothing of what is due: before the next pass rank 0 sends its buffers again, and
says that they are for such a pass. A rank that has not begun one again skips them. A rank that alone has begun one again takes
over what it began with.

On a device, the host would have to wait before it could read what arrived. There, buffers are
always sent as DDP sends them, at the start of the next forward pass of any kind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from gradlane.errors import UnsupportedError
from gradlane.live.backends.process_groups import NewGroups, ProcessGroups, is_by_host, unrecorded
from gradlane.live.session.buffer_message import BufferMessage
from gradlane.live.session.buffer_places import BufferPlaces
from gradlane.live.torch_versions import broadcast_from

_REGULAR, _ANNOUNCED = range(2)  # process groups: for regular broadcasts, and for announced ones
_WORD = "rank 0's word on the model's buffers"

WaitUntil = Callable[[Callable[[], bool], str], None]
"""Blocks until the predicate holds, or raises; the text says what is waited for."""
Announce = Callable[[int, int], None]
"""Called with the number of forward passes that have ended, and a `Word`."""


class Word(IntEnum):
    """What rank 0 says of its buffers at the start of a forward pass."""

    REGULAR = 0  # it trains or ends, and the regular broadcast has them
    AGAIN = 1  # it trains, and its script has changed one since the regular broadcast: it sends them once more
    TO_EVALUATE = 2  # it evaluates, and other ranks may too: it sends them once more


class BufferSync:
    """Keeps the buffers of one session's model equal to rank 0's.

    Used on the training thread, except that `announced` is called on the control channel's thread.
    Threads of torch.distributed report the ends of broadcasts.

    Args:
        places: of the buffers. A place rather than the tensor is kept, since a script may assign another tensor at any time.
        new_groups: makes process groups over the job's ranks.
        rank: of this process.
        timeout_s: seconds after which a broadcast that does not end is an error.
        always_at_start: broadcast at the start of forward passes, as DDP does, whatever the script
            does.
        has_channel: whether rank 0 can announce broadcasts; if not, all are as on a device.
        are_due: the first forward pass begins with rank 0's buffers.
    """

    def __init__(
        self,
        places: BufferPlaces,
        new_groups: NewGroups,
        rank: int,
        timeout_s: float,
        always_at_start: bool,
        has_channel: bool = True,
        are_due: bool = True,
    ) -> None:
        self._places, self._rank = places, rank
        self._owners, self._names = places.owners, places.names
        self._groups = ProcessGroups(new_groups, timeout_s)
        buffers = [owner[name] for owner, name in self._owners]
        self._lay_out([buffer for buffer in buffers if buffer is not None])
        self._on_cpu = self._last.bytes.device.type == "cpu"
        self._announces = self._on_cpu and has_channel
        for _ in range(1 + self._announces):
            self._groups.open()
        self._by_host = is_by_host(self._groups[0], self._last.bytes.device)  # then their ends are told
        self._may_be_early = not always_at_start and self._announces
        # whether regular broadcasts come at the end of forward passes; the same on all ranks
        self._at_end = False
        # how many forward passes have ended after which buffers are due, or which an error has left; a broadcast that is
        # for the next forward pass carries this number
        self._ended = 0
        self._tries_again = False  # an error has left the last one
        self._due_to_train = self._due_to_evaluate = self._were_due = are_due
        # in flight; on ranks other than 0: those whose reception has begun
        self._regular: deque[BufferMessage] = deque()
        # announced: `_ended` of the forward pass that each is for, and what rank 0 said
        self._extras: deque[tuple[int, Word, BufferMessage]] = deque()
        # `_ended` of the last forward pass that rank 0 has begun in order to train
        self._trained = -1
        # `_ended` of the last evaluation that has taken over what rank 0 sent to evaluate
        self._evaluated = -1
        self._script_changes = False  # rank 0's script has changed one between two forward passes
        self._closed = False
        self._closing = threading.Lock()  # the control channel's thread may announce while this one closes
        self._announce: Announce = lambda forward, word: None
        self._notify: Callable[[BaseException | None], None] = lambda error: None

    @property
    def changed(self) -> str | None:
        """The name of a buffer that is not where it was, see `BufferPlaces`."""
        return self._places.changed

    def connect(self, announce: Announce, notify: Callable[[BaseException | None], None]) -> None:
        """Set the callbacks.

        Args:
            announce: rank 0 calls it to tell the others a `Word`, before it sends buffers for it.
            notify: called on any thread when a broadcast has ended or a word has come: with None, or the broadcast's error.
        """
        self._announce, self._notify = announce, notify

    def _buffers(self, converted: bool = False) -> list[torch.Tensor]:
        """The buffers that the model has now.

        Args:
            converted: accept other dtypes, as in a model that is evaluated in half precision for a
                while.

        Raises:
            UnsupportedError: a buffer is gone; or, while broadcasts come at the end of forward
                passes, it has another dtype or shape.
        """
        found: list[torch.Tensor] = []
        others = []
        for (owner, name), dtype, shape in zip(self._owners, self._dtypes, self._shapes, strict=True):
            buffer = owner.get(name)
            if buffer is None or buffer.shape != shape or (buffer.dtype != dtype and not converted):
                others.append(len(found))
            found.append(torch.empty(0, device="cpu") if buffer is None else buffer)
        if not others:
            return found
        first = found[others[0]]
        if self._at_end or self._owners[others[0]][0].get(self._owners[others[0]][1]) is None:
            raise UnsupportedError(
                f"buffer {self._names[others[0]]} is gone, or {first.dtype} of shape {tuple(first.shape)} now, and was another "
                "before: pass broadcast_buffers='forward' to gradlane.attach, or close() the session and attach again"
            )
        # shapes may change early: observers of a quantised model learn the number of channels
        self._lay_out(found)
        return found

    def _lay_out(self, buffers: Sequence[torch.Tensor]) -> None:
        self._dtypes, self._shapes = [buffer.dtype for buffer in buffers], [buffer.shape for buffer in buffers]
        self._last = BufferMessage(buffers)  # elsewhere than on rank 0: the values that the last forward pass began with
        self._left = self._last.alike()  # rank 0: the values when the last forward pass ended
        self._idle: list[BufferMessage] = []  # with the layout of `_last`, and not in flight

    # -- forward passes ----------------------------------------------------------------------------

    def before_forward(self, wait_until: WaitUntil, trains: bool, settled: bool) -> None:
        """Take over rank 0's buffers before a forward pass, where DDP would.

        Args:
            wait_until: blocks until a predicate holds, or raises.
            trains: the pass is in training mode.
            settled: buffers may be sent at the end of forward passes from now on.

        Raises:
            UnsupportedError: a buffer is gone or has another dtype or shape.
        """
        regular = trains or not self._announces
        is_due = self._due_to_train if regular else self._due_to_evaluate
        self._due_to_evaluate = False
        if regular:
            self._were_due, self._due_to_train = is_due, False
        if not is_due:
            return
        if self._rank == 0:
            self._tell(wait_until, regular, settled, converted=not trains)
        else:
            self._listen(wait_until, regular, converted=not trains)

    def forward_raised(self) -> None:
        """Note that the last forward pass in training did not end: what it began with is due again, as under DDP.

        Raises:
            UnsupportedError: a buffer is gone or has another dtype or shape.
        """
        if self._were_due:
            self._tries_again = True
            self._ends()

    def after_forward(self) -> None:
        """Note the end of a forward pass after which DDP would broadcast; send what leaves early.

        Raises:
            UnsupportedError: a buffer is gone or has another dtype or shape.
        """
        self._tries_again = False
        self._ends()

    def _ends(self) -> None:
        self._due_to_train = self._due_to_evaluate = True
        self._ended += 1
        buffers = self._buffers()
        if self._rank == 0 and self._may_be_early:
            self._left.fill(buffers)
        if self._at_end:
            if self._rank == 0:
                self._regular.append(self._send(_REGULAR, buffers))
            else:
                # a pass in evaluation mode has used this message and left it there
                if self._regular and self._regular[0] is self._last:
                    self._regular.popleft()
                self._ask()

    def _tell(self, wait_until: WaitUntil, regular: bool, settled: bool, converted: bool) -> None:
        """Rank 0: send the buffers that are due before this forward pass."""
        while self._regular and not self._tries_again:  # what others skip they receive later
            message = self._wait(self._regular.popleft(), wait_until)
            # if not, the buffers had other shapes when it was sent
            if message.layout is self._last.layout:
                self._idle.append(message)
        buffers = self._buffers(converted)
        while self._extras and self._extras[0][2].ended:
            self._extras.popleft()
        if not regular:
            self._send_extra(Word.TO_EVALUATE, buffers)
            return
        changed = self._may_be_early and self._ended > 0 and self._has_changed(buffers)
        if not self._at_end:
            self._script_changes |= changed
            self._at_end = settled and self._may_be_early and not self._script_changes
            self._regular.append(self._send(_REGULAR, buffers))
        elif changed:
            self._send_extra(Word.AGAIN, buffers)
            return
        if self._announces:
            self._announce(self._ended, Word.REGULAR)

    def _has_changed(self, buffers: Sequence[torch.Tensor]) -> bool:
        """Rank 0: whether its values differ from those at the end of its last forward pass.

        Versions would not tell: `.data` and NumPy change values without a new version, and averages
        that are swapped in for an evaluation and out again change versions but no values.
        """
        now = self._filled(buffers)
        self._idle.append(now)
        return not now.same_values(self._left)

    def _listen(self, wait_until: WaitUntil, regular: bool, converted: bool) -> None:
        """Other ranks: take over the buffers that are due before this forward pass."""
        self._ask(must_come=regular)  # if all ranks only evaluate, rank 0 never sends it
        while self._extras and self._extras[0][0] < self._ended and self._extras[0][2].ended:
            self._extras.popleft()
        if self._at_end or (regular and self._announces):  # on a device the header is not read
            self._skip_tries_of_rank_0(wait_until)
        if self._at_end:
            if self._tries_again and not self._regular[0].is_for_another_try:
                self._try_alone()
                return
            self._last = self._regular[0]
        if not regular:
            self._take_over_to_evaluate(wait_until)
            return
        regularly_sent = self._wait(self._regular.popleft(), wait_until)
        if not self._at_end:
            self._at_end = self._may_be_early and regularly_sent.next_at_end
            self._last = regularly_sent
        else:
            wait_until(lambda: self._trained >= self._ended, _WORD)
            again = self._extra(Word.AGAIN)
            if again is not None:
                self._last = self._wait(again, wait_until)
        # if all ranks evaluate between two forward passes that train, DDP broadcasts before the evaluation alone
        if self._evaluated != self._ended:
            self._take_over(self._last, converted)

    def _skip_tries_of_rank_0(self, wait_until: WaitUntil) -> None:
        """Wait for the next regular broadcast that is not for another try of a pass which has ended here at once."""
        while self._wait(self._regular[0], wait_until).is_for_another_try and not self._tries_again:
            self._regular.popleft()
            self._ended += 1
            self._ask()

    def _try_alone(self) -> None:
        """Rank 0 has ended the pass that this rank tries again: its broadcast is for the pass after that."""
        self._tries_again = self._due_to_train = self._due_to_evaluate = False
        self._ended -= 1
        self._take_over(self._last)

    def _take_over_to_evaluate(self, wait_until: WaitUntil) -> None:
        """Take over rank 0's buffers for an evaluation: those that it evaluates with, or has gone on to train with."""
        wait_until(lambda: self._trained >= self._ended or self._extra(Word.TO_EVALUATE) is not None, _WORD)
        message = self._extra(Word.TO_EVALUATE)
        if message is not None:
            self._evaluated = self._ended
        elif self._at_end:
            message = self._last
        else:
            message = self._regular[0]
        self._take_over(self._wait(message, wait_until), converted=True)

    def _extra(self, word: Word) -> BufferMessage | None:
        """The message that was announced by `word` for the forward pass that begins."""
        for forward, of_word, message in list(self._extras):
            if forward == self._ended and of_word is word:
                return message
        return None

    # -- broadcasts --------------------------------------------------------------------------------

    def _send(self, group: int, buffers: Sequence[torch.Tensor]) -> BufferMessage:
        message = self._filled(buffers)
        if self._on_cpu:  # a device would have to be waited for, and nobody reads it there
            message.next_at_end, message.is_for_another_try = self._at_end, self._tries_again
        return self._start(message, group)

    def _filled(self, buffers: Sequence[torch.Tensor]) -> BufferMessage:
        message = self._idle.pop() if self._idle else self._last.alike()
        message.fill(buffers)
        return message

    def _send_extra(self, word: Word, buffers: Sequence[torch.Tensor]) -> None:
        self._announce(self._ended, word)
        self._extras.append((self._ended, word, self._send(_ANNOUNCED, buffers)))

    def announced(self, forward: int, word: int) -> None:
        """Rank 0 has said something about its buffers; begin to receive what it sends for that.

        Args:
            forward: it concerns the forward pass that follows the first `forward` ones.
            word: a `Word`.
        """
        if word != Word.REGULAR:
            with self._closing:
                if self._closed:
                    return
                message = self._last.alike()
                self._extras.append((forward, Word(word), message))
                try:
                    self._start(message, _ANNOUNCED)
                except dist.DistError as error:  # a rank is gone
                    self._notify(error)
                    return
        if word != Word.TO_EVALUATE:
            self._trained = forward  # set last: the training thread then looks for the message in `_extras`
        self._notify(None)

    def _ask(self, must_come: bool = True) -> None:
        """Begin to receive the next regular broadcast, unless one is in flight.

        Args:
            must_come: False if rank 0 may never send it. One in flight that must come stays so.
        """
        if not self._regular:
            message = self._last.alike()
            message.must_come = must_come
            self._regular.append(self._start(message, _REGULAR))
        elif must_come:
            self._regular[0].must_come = True

    def _start(self, message: BufferMessage, group: int) -> BufferMessage:
        message.ended = False
        message.work = unrecorded(broadcast_from, 0, message.bytes, self._groups[group], True)
        if self._by_host:

            def end(error: BaseException | None) -> None:
                message.ended = error is None
                # an announced broadcast of rank 0's may still be in flight to a rank that has left
                matters = message.must_come and not (self._rank == 0 and group == _ANNOUNCED)
                self._notify(error if matters else None)

            self._groups.when_ended([message.work], end)
        return message

    def _wait(self, message: BufferMessage, wait_until: WaitUntil) -> BufferMessage:
        if self._by_host and not message.ended:
            wait_until(lambda: message.ended, "the broadcast of the model's buffers")
        if not self._on_cpu and message.work is not None:
            message.work.wait()  # the stream waits
        message.work = None
        return message

    def _take_over(self, message: BufferMessage, converted: bool = False) -> None:
        # `.data` changes no version, as in DDP: the backward pass of an earlier forward pass, which
        # checks versions, may still come
        torch._foreach_copy_([buffer.data for buffer in self._buffers(converted)], message.values)

    def finish(self, wait_until: WaitUntil) -> None:
        """Wait for the broadcasts in flight that must come; rank 0 lets those go on that still evaluate."""
        if self._rank == 0 and self._announces:
            self._announce(self._ended, Word.REGULAR)
        for message in self._regular:
            if message.must_come:
                self._wait(message, wait_until)

    def interrupt(self) -> None:
        """The job has failed: end broadcasts that are stuck on a device."""
        if not self._by_host:
            self._groups.abort()

    def close(self) -> None:
        """Close the process groups, unless a broadcast is in flight to a rank that has left."""
        with self._closing:
            self._closed = True
        extras = [message for _, _, message in list(self._extras)]
        if all(message.ended for message in (*self._regular, *extras)):
            self._groups.close()
