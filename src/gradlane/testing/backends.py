"""What every backend promises: whatever carries the messages of a live session.

On every rank of a job, after `torch.distributed.init_process_group`:

    check_backend(MyBackend(...))
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from msgspec import UNSET, UnsetType, structs

from gradlane.core.backends import BackendName
from gradlane.core.plan import Lane, Message, Ownership, Plan, Slice, Wire
from gradlane.core.profile import DTYPE_BYTES, TensorSpec
from gradlane.errors import JobError, OrderError
from gradlane.live.backends.base import Backend
from gradlane.live.backends.copies import is_equal_on_all
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.streams import Event
from gradlane.schedule import NativeDispatcher

_ELEMENTS = (1, 7, 64, 1_000, 5_000, 33)  # of each tensor
_ITERATIONS = 3


def check_backend(
    backend: Backend,
    *,
    device: torch.device | None = None,
    wires: Sequence[Wire] = ("fifo",),
    over: Sequence[BackendName | UnsetType] = (UNSET,),
    two_phase: bool = True,
    owners: bool = False,
    dtype: str = "float32",
    wire_dtype: str | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Raise `AssertionError` unless `backend` keeps every promise of a backend.

    Collective: every rank of the backend's process group calls it alike. It closes the backend.

    - All ranks measure the same networks, of as many workers as there are ranks, and can go on with them.
    - Every message is summed in place over all ranks, whole or in two phases, gathered from
      scattered ranges and put back, iteration after iteration, under one plan after another.
    - `on_done` is called once for each message (or phase), without an error, unless `start` says that it has ended. `on_sent`
      is called once before it if the sums say `tells_sends`, else never.
    - Ranks may start messages in any order, each in its own. Sums that say `needs_one_order` take the order at the beginning
      or message by message, and refuse any other message with `OrderError`.

    Sums are of small integers, so that they are exact in any order.

    Args:
        backend: as it has been made; nothing has been called on it.
        device: of the gradients; the CPU where not given.
        wires: kinds of `Plan.wire` that it carries.
        over: what each plan names as its `Plan.backend`, one after another, for a backend that
            has several carriers.
        two_phase: whether it carries two-phase messages.
        owners: whether it carries plans whose tensors have owners.
        dtype: of the gradients, a key of `gradlane.core.profile.DTYPE_BYTES`.
        wire_dtype: "bfloat16" or "float16", as which float32 gradients travel; None for float32.
        timeout_s: seconds that the sums of one iteration may take.

    Raises also what the backend itself raises, and closes it with that as the failure.
    """
    try:
        _check_measured(backend, dist.get_world_size(backend.control_group))
        device = device or torch.device("cpu")
        specs = tuple(
            TensorSpec(f"t{index}", count * DTYPE_BYTES[dtype], dtype).on_wire(wire_dtype)
            for index, count in enumerate(_ELEMENTS)
        )
        for wire in wires:
            plans = _plans(specs, wire, two_phase, lanes=1 if backend.has_streams else 2)
            if owners:
                plans.append(_owned(specs, dist.get_world_size(backend.control_group)))
            for plan in plans:
                for named in over:
                    run = _Run(backend, structs.replace(plan, backend=named), getattr(torch, dtype), device, timeout_s)
                    run.run()
    except BaseException as error:
        backend.close(JobError(f"check_backend: {error}"))
        raise
    backend.close(None)


def _check_measured(backend: Backend, world: int) -> None:
    measured = backend.measure()
    for network in measured.networks.values():
        assert network.workers == world, f"measure: a network of {network.workers} workers, expected {world}"
    is_equal = is_equal_on_all(repr(measured).encode(), backend.control_group, backend.control_device)
    assert is_equal, f"measure: ranks have measured different networks, this one {measured}"
    backend.take_over(measured)


def _plans(specs: tuple[TensorSpec, ...], wire: Wire, two_phase: bool, lanes: int) -> list[Plan]:
    """A message a tensor; then tensors that are cut, merged across gaps and held back on one or two lanes,
    and so in two phases.
    """
    other = lanes - 1
    each = tuple(Message((Slice(tensor, 0, spec.size_bytes),), tensor) for tensor, spec in enumerate(specs))
    half = specs[4].size_bytes // 2
    mixed = (
        Message((Slice(0, 0, specs[0].size_bytes), Slice(2, 0, specs[2].size_bytes)), priority=3),
        Message((Slice(4, half, specs[4].size_bytes - half),), priority=1, lane=other),
        Message((Slice(1, 0, specs[1].size_bytes),), hold_until=5),
        Message((Slice(3, 0, specs[3].size_bytes), Slice(4, 0, half)), priority=2, lane=other),
        Message((Slice(5, 0, specs[5].size_bytes),), priority=4),
    )
    plan = Plan("check", "check", specs, each, wire=wire)
    windows = (Lane(window_bytes=specs[2].size_bytes), Lane())[:lanes]
    found = [plan, structs.replace(plan, messages=mixed, lanes=windows)]
    if two_phase:
        split = tuple(structs.replace(message, two_phase=place != 2) for place, message in enumerate(mixed))
        found.append(structs.replace(plan, messages=split, lanes=windows))
    return found


def _owned(specs: tuple[TensorSpec, ...], world: int) -> Plan:
    """Tensors with owners: messages in which some rank owns nothing, one of a single phase, and one second phase early."""
    owner_of = tuple(tensor % world for tensor in range(len(specs)))
    groups = ((0, 3, 1), (2,), (4, 5))
    messages = tuple(
        Message(
            tuple(Slice(tensor, 0, specs[tensor].size_bytes) for tensor in sorted(group, key=lambda each: owner_of[each])),
            priority=place,
            two_phase=place != 1,
        )
        for place, group in enumerate(groups)
    )
    return Plan("check", "check", specs, messages, sequence=(2, 1, 2, 0), owners=Ownership(owner_of))


class _Run:
    """Iterations of one plan on one rank, driven by a Dispatcher as a session drives them."""

    def __init__(self, backend: Backend, plan: Plan, dtype: torch.dtype, device: torch.device, timeout_s: float) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        self._rank, self._world = dist.get_rank(backend.control_group), dist.get_world_size(backend.control_group)
        params = [torch.nn.Parameter(torch.zeros(count, dtype=dtype, device=device)) for count in _ELEMENTS]
        self._gradients = GradientBuffers(params)
        buffers = self._gradients.message_buffers(plan)
        sums = backend.prepare(plan, buffers)
        if sums.needs_one_order and plan.sequence is None:
            plan = plan.with_sequence(tuple(reversed(range(len(plan.messages)))))
            sums = backend.prepare(plan, buffers)
        self._plan, self._sums = plan, sums
        self._dispatcher = NativeDispatcher(plan)
        self._changed = threading.Condition(threading.RLock())
        self._told: list[list[str]] = []
        self._events: list[Event | None] = []
        self._to_start: list[int] = []
        self._starting = self._by_message = False
        self._missing = 0
        self._failure: BaseException | None = None
        # a message without a phase of its own to end is told of once
        once = ["sent", "done"] if sums.tells_sends else ["done"]
        twice = once if sums.tells_sends else ["done", "done"]
        self._expected = [twice if message.two_phase else once for message in plan.messages]

    def run(self) -> None:
        if self._sums.needs_one_order:
            self._check_refused()
        for iteration in range(_ITERATIONS):
            self._iterate(iteration)

    def _order(self) -> list[list[int]]:
        order: list[list[int]] = [[] for _ in self._plan.lanes]
        for message in (*(self._plan.sequence or ()), *self._plan.late_second_phases):
            order[self._plan.messages[message].lane].append(message)
        return order

    def _check_refused(self) -> None:
        """Starting the second message of the agreed order first is refused, and leaves no trace."""
        order = self._order()
        lane = next(each for each in order if len(each) > 1)
        self._sums.begin(order)
        try:
            self._sums.start(lane[1], [], lambda *_: None, lambda _: None)
        except OrderError:
            return
        raise AssertionError(f"message {lane[1]} was started where the agreed order has {lane[0]}; expected OrderError")

    def _iterate(self, iteration: int) -> None:
        tensors = list(range(len(_ELEMENTS)))
        # each rank has its gradients in an order of its own
        shift = (self._rank + iteration) % len(tensors)
        for tensor in tensors:
            self._gradients.slots[tensor].copy_(self._values(tensor, iteration) * (self._rank + 1))
        self._gradients.mark_all_present()
        with self._changed:
            self._told = [[] for _ in self._plan.messages]
            self._events = [None] * len(tensors)
            self._missing = len(self._plan.messages)
            # the last time the order comes message by message, as from a coordinator
            self._by_message = self._sums.needs_one_order and iteration == _ITERATIONS - 1
            self._dispatcher.begin()
            self._sums.begin([[] for _ in self._plan.lanes] if self._by_message else self._order())
        for tensor in tensors[shift:] + tensors[:shift]:
            self._events[tensor] = self._sums.so_far()
            with self._changed:
                self._start(self._dispatcher.ready(tensor))
        with self._changed:
            self._sums.look()
            self._sums.await_ends(range(len(self._plan.messages)))
            self._changed.wait_for(lambda: not self._missing or self._failure, self._timeout_s)
            if self._failure is not None:
                raise AssertionError(f"{self._where(iteration)}: {self._failure}") from self._failure
            assert not self._missing, (
                f"{self._where(iteration)}: no end within {self._timeout_s:g} s; told were {self._told}, "
                f"expected {self._expected}; {self._dispatcher.describe_state()}"
            )
        if self._backend.has_streams:
            for message in range(len(self._plan.messages)):
                self._sums.join(message)
        self._check_sums(iteration)
        for message in range(len(self._plan.messages)):
            assert self._sums.has_ended(message), f"{self._where(iteration)}: the sum of message {message} has not ended"
        with self._changed:
            assert self._told == self._expected, f"{self._where(iteration)}: told {self._told}, expected {self._expected}"

    def _check_sums(self, iteration: int) -> None:
        for tensor, slot in enumerate(self._gradients.slots):
            expected = self._values(tensor, iteration) * (self._world * (self._world + 1) // 2)
            differ = (slot.cpu() != expected.cpu()).nonzero().flatten().tolist()
            assert not differ, (
                f"{self._where(iteration)}: the sum of tensor {tensor} is wrong in {len(differ)} of {slot.numel()} elements, "
                f"first in {differ[0]}: got {slot[differ[0]]}, expected {expected[differ[0]]}"
            )
            self._check_norm(tensor, expected, iteration)
            presence = float(self._gradients.presence[tensor])
            assert presence == self._world, f"{self._where(iteration)}: {presence:g} ranks took part in tensor {tensor}"

    def _check_norm(self, tensor: int, expected: torch.Tensor, iteration: int) -> None:
        norms = self._sums.norms
        assert (norms is None) == (self._plan.owners is UNSET), f"{self._where(iteration)}: norms are {norms}"
        if norms is not None:
            assert norms.are_there, f"{self._where(iteration)}: all sums are there, and their norms are not"
            factor = norms.factor
            assert norms.are_finite_by(factor), f"{self._where(iteration)}: norms of sums times {factor} are not told"
            assert not norms.are_finite_by(factor / 3), f"{self._where(iteration)}: they are told for every factor"
            for is_multiplied in {False, factor != 1}:
                norm = torch.linalg.vector_norm(expected * factor if is_multiplied else expected)
                told = norms.of(tensor, is_multiplied)
                same = told.dtype == norm.dtype and bool(told == norm)
                assert same, f"{self._where(iteration)}: the norm of tensor {tensor} is {told}, expected {norm}"
            norms.next_factor = 0.5 ** (iteration + 1)

    def _values(self, tensor: int, iteration: int) -> torch.Tensor:
        slot = self._gradients.slots[tensor]
        return (torch.arange(slot.numel(), device=slot.device) + 3 * tensor + 7 * iteration).remainder(11).add(1).to(slot.dtype)

    def _where(self, iteration: int) -> str:
        return f"rank {self._rank}, wire {self._plan.wire}, plan {self._plan.fingerprint}, iteration {iteration}"

    # -- on any thread -------------------------------------------------------------------------------------

    def _start(self, messages: list[int]) -> None:
        self._to_start.extend(messages)
        if self._starting:  # told of an end while starting: the loop below goes on with it
            return
        self._starting = True
        try:
            while self._to_start:
                message = self._to_start.pop(0)
                if self._by_message:
                    self._sums.expect(message)
                if self._dispatcher.in_second_phase(message):
                    ended = self._sums.start_second_phase(message, self._on_done)
                else:
                    needed = [self._events[tensor] for tensor in self._plan.messages[message].tensors]
                    ready = [event for event in needed if event is not None]
                    ended = self._sums.start(message, ready, self._on_done, self._on_sent)
                if ended:
                    self._done(message)
        finally:
            self._starting = False

    def _on_done(self, message: int, error: BaseException | None) -> None:
        with self._changed:
            try:
                if error is not None:
                    raise error
                self._done(message)
            except BaseException as failure:
                self._failure = self._failure or failure
            self._changed.notify_all()

    def _on_sent(self, message: int) -> None:
        with self._changed:
            try:
                assert self._sums.tells_sends, f"message {message} is told to be sent, and these sums tell no sends"
                self._told[message].append("sent")
                self._start(self._dispatcher.finished(message))
            except BaseException as failure:
                self._failure = self._failure or failure
            self._changed.notify_all()

    def _done(self, message: int) -> None:
        self._told[message].append("done")
        told, expected = self._told[message], self._expected[message]
        assert told == expected[: len(told)], f"message {message}: told {told}, expected {expected}"
        self._missing -= told == expected  # before others are started: one may end meanwhile, on this thread
        if not self._sums.tells_sends or self._plan.messages[message].two_phase:
            self._start(self._dispatcher.finished(message))
