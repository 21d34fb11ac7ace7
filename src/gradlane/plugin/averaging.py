"""Averaging: the gradients of one model averaged over ranks, for frameworks that hand out NumPy arrays.

A node of gradlane's transport carries the plan out by itself (`transport.NodeEngine`): once a gradient has been
handed over, sending and summing do not need the GIL. `gradlane.plugin.jax` and `gradlane.plugin.tensorflow` call it
from inside of a compiled step.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Span, Timeline
from gradlane.errors import GradlaneError, InputError, JobError, MismatchError, PlanError, described
from gradlane.planning import catalog
from gradlane.planning.plans import accepted, make_plan
from gradlane.plugin.meeting import Meeting, Store
from gradlane.transport import CopiedRange, MessageMemory, Node, NodeEngine, NodeOptions
from gradlane.transport.formation import form

Array = npt.NDArray[Any]
Own = TypeVar("Own", bound="Averaging")

MEASURED = 2
"""The iteration whose times of readiness are planned with; those before it run under an assumed order. The first iterations
of a compiled step are slower than the others."""
_KEPT = 64  # iterations whose waits are kept for the timeline, as many as a node keeps
_ASSUMED = (20_000, 10**9)  # ns a message, bytes per second: for policies that ask, where no network is given


class Averaging:
    """Averages gradients over all ranks, iteration after iteration, on gradlane's own transport with a server in each process.

    In each iteration every tensor is handed over once and then all are taken. All ranks do so with the same tensors. Any
    thread may call; calls that hand over do not wait for the network. A framework that calls from inside of a compiled step
    raises an error of its own for one of these; leaving a `with` block turns it into the job's.

    Args:
        specs: the gradients, in the order in which the forward pass uses their parameters, as far as that is known.
        policy: a name from `gradlane policies`, a Policy with its knobs, or a Plan for these tensors. It plans from the times
            at which gradients were ready on rank 0 in iteration 2; a Plan is used from the start.
        network: what a policy plans for; None for 20 us a message and 1 GB/s, which `mercury` does not look at.
        meeting: who this process is; None to read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        timeout_s: seconds to wait for ranks and for sums.

    Attributes:
        rank, world: of this process, and the number of ranks.
        plan: the plan in force.
        failure: what ended the job, or None.

    Raises:
        InputError: the meeting or the policy is not usable.
        PlanError: the plan does not fit the tensors or needs lanes, which there is one of.
        CommunicationError: a rank did not come within `timeout_s`.
        MismatchError: ranks have different tensors, policies or worlds.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        policy: str | Policy | Plan = "mercury",
        *,
        network: Network | None = None,
        meeting: Meeting | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        meeting = meeting or Meeting.of()
        self.rank, self.world, self._timeout_s = meeting.rank, meeting.world, timeout_s
        self.failure: GradlaneError | None = None
        self._specs = tuple(specs)
        self._policy = catalog.get(policy) if isinstance(policy, str) else policy
        self._place = Place(network or Network.line(max(2, self.world), *_ASSUMED), "server")
        self._memory = [np.zeros(spec.size_bytes, np.uint8) for spec in specs]
        self._lock = threading.Lock()
        self._iteration = -1
        self._handed_over: dict[int, int] = {}  # tensors of this iteration, with the time in ns
        self._spans: list[Span] = []  # waits
        self._next = 0  # the node's next tensor
        first_plan = self._plan(self._assumed())
        store = Store(meeting, timeout_s)
        options = NodeOptions(self.world, self.world, self.rank, self.rank, fingerprint=self._fingerprint(first_plan))
        self._node: Node = form(store, options, store.address, timeout_s, store_address=store.store_address)
        try:
            self._take_up(first_plan)
        except BaseException:
            self._node.close()
            raise

    # -- an iteration --------------------------------------------------------------------------------------

    def hand_over(self, tensor: int, gradient: Array) -> None:
        """This rank's gradient of `tensor` is there; it is copied, and sent when the plan says so.

        Args:
            tensor: index into `specs`.
            gradient: of the spec's bytes and dtype, in C order.

        Raises:
            InputError: the tensor has been handed over in this iteration, or the array does not fit.
            JobError: the job has failed.
        """
        spec = self._specs[tensor]
        with self._step():
            if gradient.nbytes != spec.size_bytes or gradient.dtype.name != spec.dtype:
                raise InputError(
                    f"{spec.name}: got a gradient of {gradient.nbytes} bytes of {gradient.dtype.name}, expected "
                    f"{spec.size_bytes} of {spec.dtype}"
                )
            if tensor in self._handed_over:
                raise InputError(
                    f"{spec.name}: its gradient came twice in iteration {self._iteration}, expected one average a step; add "
                    "gradients up first, and average their sum"
                )
            self._node.check()
            if not self._handed_over:
                self._begin()
            self._handed_over[tensor] = time.monotonic_ns()
            memory = self._memory[tensor].view(gradient.dtype)
            np.divide(gradient.reshape(-1), gradient.dtype.type(self.world), out=memory)
            self._engine.ready((self._place_of[tensor],))
            if len(self._handed_over) == len(self._specs):
                self._engine.flush()

    def take(self) -> list[Array]:
        """Wait for all averages of this iteration.

        Returns:
            By tensor its average as bytes, in memory that the next iteration overwrites.

        Raises:
            JobError: the job has failed, or a sum did not come in time.
        """
        with self._step():
            missing = [spec.name for index, spec in enumerate(self._specs) if index not in self._handed_over]
            if missing:
                raise InputError(f"{missing[0]}: it was not handed over in iteration {self._iteration}, expected every tensor")
            start_ns = time.monotonic_ns()
            self._engine.wait_or_fail(None, self._timeout_s, self._late)
            self._spans = [
                *self._spans[1 - _KEPT :],
                Span("wait", self._iteration, -1, start_ns, time.monotonic_ns()),
            ]
            self._last, self._handed_over = self._handed_over, {}
            return self._memory

    def _late(self) -> str:
        return f"iteration {self._iteration}: not all sums came ({self._engine.describe_state()})"

    def broadcast(self, arrays: Sequence[Array]) -> list[Array]:
        """Copies of rank 0's arrays, on every rank, bit for bit. Between two iterations; all ranks call it.

        Args:
            arrays: of any dtype; shapes and dtypes as on rank 0.
        """
        copies = [np.array(array, order="C") for array in arrays]
        for copy in copies:
            self._send_from_rank_0(copy)
        return copies

    # -- plans -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._iteration += 1
        if self._iteration == MEASURED + 1 and not isinstance(self._policy, Plan):
            ready_ns = np.array([self._last[tensor] for tensor in range(len(self._specs))], np.int64)
            self._send_from_rank_0(ready_ns)
            plan = self._plan(self._profile(ready_ns - ready_ns.min(), "measured"))
            self._compare(plan)
            self._take_up(plan)
        self._engine.begin(self._iteration)

    def _compare(self, plan: Plan) -> None:
        """Raise `MismatchError` if rank 0 has another plan: its policy is not the same code, say."""
        mine = np.frombuffer(plan.fingerprint.encode(), np.uint8)
        if not np.array_equal(self.broadcast([mine])[0], mine):
            raise MismatchError(
                f"rank {self.rank}: it made another plan than rank 0 from the same profile, expected one release of gradlane "
                "and one policy, which plans without chance, on all ranks"
            )

    def _assumed(self) -> Profile:
        """Gradients come in the reverse order of use, at times in proportion to their bytes."""
        sizes = np.array([spec.size_bytes for spec in self._specs], np.int64)
        return self._profile(sizes[::-1].cumsum()[::-1], "assumed")

    def _profile(self, ready_ns: npt.NDArray[np.int64], source: str) -> Profile:
        """Parameters are used in the reverse order of their gradients, and a forward pass takes half of a backward pass."""
        order = np.argsort(ready_ns, kind="stable")
        last = len(order) - 1
        tensors = tuple(TensorProfile(self._specs[tensor], int(ready_ns[tensor]), last - at) for at, tensor in enumerate(order))
        forward_ns = int(ready_ns.max()) // (2 * len(order))
        layers = tuple(Layer(self._specs[tensor].name, forward_ns) for tensor in order[::-1])
        return Profile("model", "host", tensors, layers, int(ready_ns.max()), source)

    def _plan(self, profile: Profile) -> Plan:
        if isinstance(self._policy, Plan):
            plan = accepted(self._policy, profile.in_order_of(self._policy.tensors), self._place)
        else:
            plan = make_plan(self._policy, profile, self._place)
        if len(plan.lanes) > 1:
            raise PlanError(f"plan {plan.policy}: got {len(plan.lanes)} lanes, expected one; choose another policy")
        return plan

    def _fingerprint(self, plan: Plan) -> bytes:
        """A digest of what must be equal on all ranks."""
        terms = [self.world, repr(self._policy), plan.fingerprint, self._place, self._specs]
        return hashlib.sha256(msgspec.json.encode(terms)).digest()

    def _take_up(self, plan: Plan) -> None:
        index = {spec.name: tensor for tensor, spec in enumerate(self._specs)}
        memory = [self._memory[index[spec.name]] for spec in plan.tensors]  # in the plan's order
        self._place_of = {index[spec.name]: place for place, spec in enumerate(plan.tensors)}
        self._node.forget_below(self._next)
        first = self._next
        self._whole = [_whole(message, memory) for message in plan.messages]
        for message, whole in zip(plan.messages, self._whole, strict=True):
            self._node.define(
                self._next,
                whole.ctypes.data,
                whole.nbytes,
                plan.tensors[message.slices[0].tensor].dtype,
                wire=plan.wire,
                priority=message.priority,
                lane=message.lane,
                acknowledged=plan.acknowledges(message),
            )
            self._next += 1
        where = [
            MessageMemory(whole.ctypes.data, _ranges(message, memory))
            for message, whole in zip(plan.messages, self._whole, strict=True)
        ]
        self.plan, self._engine = plan, NodeEngine(self._node, plan, where, first)

    def _send_from_rank_0(self, array: Array) -> None:
        data = array.reshape(-1).view(np.uint8)
        if data.nbytes == 0:
            return
        tensor, self._next = self._next, self._next + 1
        self._node.start(tensor, data.ctypes.data, data.ctypes.data, data.nbytes, "uint8", sender=0)
        self._node.wait(tensor, self._timeout_s)

    # -- what happened, and the end ----------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """When gradients were ready, messages were sent and received, and this rank waited, since the plan in force began."""
        since = [Span(*span) for span in self._engine.spans(last=False)]
        first = min((span.iteration for span in since), default=0)
        waits = [span for span in self._spans if span.iteration >= first]
        return Timeline(self.plan.fingerprint, self.rank, tuple(sorted([*since, *waits], key=lambda span: span.start_ns)))

    def close(self, reason: str = "") -> None:
        """Send what is queued and leave the job.

        Args:
            reason: why this rank gives up; the others raise `PeerFailed` with it. "" if it is done.
        """
        self.failure = self.failure or JobError("the averaging of gradients is closed")
        if reason:
            self._node.abort(reason)
        self._node.close()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        failure = self.failure
        self.close("" if error is None else described(error))
        if failure is not None and error is not failure:
            raise failure from error

    @contextmanager
    def _step(self) -> Iterator[None]:
        """One call at a time. The first failure stands, and every later call raises it."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            try:
                yield
            except GradlaneError as error:
                self.failure = error
                raise


def _whole(message: Message, memory: Sequence[Array]) -> Array:
    """The memory in which a message is summed: the tensor's own where it has one slice."""
    if len(message.slices) == 1:
        part = message.slices[0]
        return memory[part.tensor][part.offset_bytes : part.offset_bytes + part.size_bytes]
    return np.zeros(sum(part.size_bytes for part in message.slices), np.uint8)


def _ranges(message: Message, memory: Sequence[Array]) -> list[CopiedRange]:
    if len(message.slices) == 1:
        return []
    return [CopiedRange(memory[part.tensor].ctypes.data + part.offset_bytes, part.size_bytes) for part in message.slices]
