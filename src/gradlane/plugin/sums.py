"""NodeSums: a summation of NumPy arrays in place, over gradlane's own transport."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.plan import Message, Plan
from gradlane.errors import InputError, JobError, PlanError
from gradlane.plugin.core import Core
from gradlane.transport import FOR_EVER_S, Node

Array = npt.NDArray[Any]


class NodeSums:
    """Sums arrays over all workers of a joined node. Owns one thread; `close()` ends it and the
    node.

    A message of one slice is summed in place, one of several in a copy.

    Args:
        node: the node.
        arrays: the plan's tensors, in its order; C-contiguous, writable, in place for the node's
            life.
    """

    def __init__(self, node: Node, arrays: Sequence[Array]) -> None:
        for index, array in enumerate(arrays):
            if not array.flags.c_contiguous or not array.flags.writeable:
                raise InputError(f"arrays[{index}]: got one that is not C-contiguous and writable, expected such a one")
        self._node = node
        self._flat = [array.reshape(-1).view(np.uint8) for array in arrays]
        self._dtypes = [array.dtype.name for array in arrays]
        self._core: Core | None = None
        self._slices: list[list[Array]] = []  # for each message, the memory of its slices
        self._whole: list[Array] = []  # for each message, where it is summed
        self._held: set[int] = set()  # two-phase messages whose second phase has not begun
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradlane-sums", daemon=True)

    def partition(self, plan: Plan, core: Core) -> None:
        """Define each message as a tensor of the node.

        Raises:
            PlanError: the plan does not fit the arrays or the node.
        """
        self._refuse(plan)
        assert self._core is None, "a summation serves one core"
        self._core = core
        for message in plan.messages:
            self._slices.append([self._flat[p.tensor][p.offset_bytes : p.offset_bytes + p.size_bytes] for p in message.slices])
            self._whole.append(self._slices[-1][0] if len(self._slices[-1]) == 1 else np.concatenate(self._slices[-1]))
            self._define(message, plan)
        self._thread.start()

    def _define(self, message: Message, plan: Plan) -> None:
        memory = self._whole[-1]
        self._node.define(
            len(self._whole) - 1,
            memory.ctypes.data,
            memory.nbytes,
            self._dtypes[message.slices[0].tensor],
            wire=plan.wire,
            priority=message.priority,
            lane=message.lane,
            acknowledged=plan.acknowledges(message),
        )

    def _refuse(self, plan: Plan) -> None:
        refuse_what_cannot_be_done(plan, "server", external=self._node.options.server is None)
        if len(plan.lanes) > len(self._node.options.lanes):
            raise PlanError(
                f"plan {plan.policy}: got {len(plan.lanes)} lanes, expected at most the node's {len(self._node.options.lanes)}"
            )
        mine = [(flat.nbytes, dtype) for flat, dtype in zip(self._flat, self._dtypes, strict=True)]
        theirs = [(spec.size_bytes, spec.dtype) for spec in plan.tensors]
        if mine != theirs:
            raise PlanError(f"plan {plan.policy}: it is of tensors of {theirs}, the arrays are of {mine} (bytes and dtype)")

    def start(self, message: int) -> None:
        """Push `message`; for the second phase of a two-phase message, release its sums."""
        assert self._core is not None
        if message in self._held:
            self._held.remove(message)
            self._node.release(message)
            return
        two_phase = self._core.plan.messages[message].two_phase
        if two_phase:
            self._held.add(message)
        if len(self._slices[message]) > 1:
            np.concatenate(self._slices[message], out=self._whole[message])
        self._node.push(message, notify_sent=True, held=two_phase)

    def _run(self) -> None:
        assert self._core is not None
        while not self._ending.is_set():
            try:
                done = self._node.take(FOR_EVER_S)
            except JobError as error:
                self._core.notify_failure(error)
                return
            for message in done:
                if message < 0:  # has been sent
                    self._core.notify_sent(~message)
                else:
                    self._scatter(message)
                    self._core.notify_finish(message)

    def _scatter(self, message: int) -> None:
        if len(self._slices[message]) > 1:
            offset = 0
            for piece in self._slices[message]:
                piece[:] = self._whole[message][offset : offset + piece.nbytes]
                offset += piece.nbytes

    def close(self) -> None:
        """Send what is queued, and end the node and the thread."""
        self._ending.set()
        self._node.close()
        if self._thread.ident is not None:
            self._thread.join()
