"""Values: a worker's access to the parameters and optimizer state that servers keep.

Each parameter has a slot. This piece of memory holds the worker's gradient until it is sent, and the new parameters once they
are received. A plan divides them into messages, and each message is a tensor of the node (`gradlane.transport.Node`). There is
no thread here: the node carries out the plan, and a caller that needs a value blocks in the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from gradlane.core.plan import Plan
from gradlane.errors import JobError, PeerDied, UnsupportedError
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.comm.long_waits import saying
from gradlane.live.remote_update.departures import Departures
from gradlane.transport import FOR_EVER_S, MessageMemory, Node, NodeEngine, Part, Rule

_LOOK_S = 2.0  # a wait looks so often whether somebody has left


class SentGradient:
    """A gradient that was sent, to find out whether the script changes it afterwards.

    It holds a reference, which keeps autograd from reusing the gradient's memory.
    """

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient, self._version, self._address = gradient, gradient._version, gradient.data_ptr()

    def is_unchanged_in(self, param: torch.nn.Parameter) -> bool:
        """Whether `param.grad` is the gradient that was sent, unchanged; writes through its `data` are not noticed."""
        gradient = self._gradient
        return param.grad is gradient and gradient._version == self._version and gradient.data_ptr() == self._address


class Values:
    """The parameters of one worker; they are called tensors here and numbered in the order of
    `params`.

    The constructor registers them with the servers, sends the present parameters, and waits until
    that is done. Methods that wait, as the constructor does, raise a `JobError` if the job fails or
    after `timeout_s`. "No tensor in flight" means: every tensor that was sent has come back.

    Args:
        node: connected, without tensors so far.
        plan: the messages, each a part of one parameter. Its tensors are `params` from the last to the first.
        params: the most urgent first.
        groups: for each of `params` the index of its parameter group.
        rules: for each parameter group the update rule.
        staleness: iterations that this worker may be ahead of the slowest; `transport.UNBOUNDED`
            for no bound.
        timeout_s: seconds after which a wait is an error.
        departures: of the job; a rank that has closed its session too soon ends a wait.

    Attributes:
        slots: the memory of each tensor, in the parameter's shape.
        plan: as given.
    """

    def __init__(
        self,
        node: Node,
        plan: Plan,
        params: Sequence[torch.nn.Parameter],
        groups: Sequence[int],
        rules: Sequence[Rule],
        staleness: int,
        timeout_s: float,
        departures: Departures,
    ) -> None:
        self._node, self._timeout_s, self._departures = node, timeout_s, departures
        self._iteration = -1
        self._kinds = [rule.kind for rule in rules]
        self._parts = [rules[group].parts for group in groups]
        self._rules: list[Rule | None] = [None] * len(rules)
        self.slots = GradientBuffers(params).slots
        self._last = len(params) - 1
        self._messages = plan.messages_by_tensor[::-1]  # of each tensor
        memory = []
        for index, message in enumerate(plan.messages):
            (piece,) = message.slices
            tensor = self._last - piece.tensor
            address = self.slots[tensor].data_ptr() + piece.offset_bytes
            memory.append(MessageMemory(address, ()))
            node.define_updated(
                index,
                address,
                piece.size_bytes,
                rules[groups[tensor]],
                staleness=staleness,
                group=groups[tensor],
                wire=plan.wire,
                priority=message.priority,
                acknowledged=plan.acknowledges(message),
            )
        self._meeting, self._meeting_id = torch.zeros(1, device="cpu"), len(plan.messages)
        node.define(self._meeting_id, self._meeting.data_ptr(), 4, "float32")
        with torch.no_grad():
            torch._foreach_copy_(self.slots, [param.detach() for param in params])
        for index in range(len(plan.messages)):
            node.push(index, notify=False)
        self._wait_for_all()
        self.plan, self._engine = plan, NodeEngine(node, plan, memory, 0)

    def _wait_for_all(self) -> None:
        for messages in self._messages:
            for index in messages:
                self._node.wait(index, self._timeout_s)

    def _tensors_with(self, part: Part) -> list[int]:
        return [tensor for tensor, parts in enumerate(self._parts) if part == "parameters" or part in parts]

    def place(self, part: Part, values: Sequence[torch.Tensor]) -> None:
        """Write rank 0's values of a part to the servers. No tensor may be in flight.

        Args:
            part: "parameters", or a part of the optimizer's state; tensors whose rule does not keep
                it are left out.
            values: for each tensor.
        """
        tensors = self._tensors_with(part)
        with torch.no_grad():
            for tensor in tensors:
                self.slots[tensor].copy_(values[tensor])
                for index in self._messages[tensor]:
                    self._node.place(index, part)
        self._wait_for_all()

    def fetch(self, part: Part) -> dict[int, torch.Tensor]:
        """Read a part from the servers, by tensor; tensors whose rule does not keep it are left
        out. No tensor may be in flight.
        """
        tensors = self._tensors_with(part)
        for tensor in tensors:
            for index in self._messages[tensor]:
                self._node.fetch(index, part)
        self._wait_for_all()
        return {tensor: self.slots[tensor].clone() for tensor in tensors}

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Use `rules`, one for each parameter group, for every later gradient. No tensor may be in
        flight.

        Raises:
            InputError: no update can have the numbers of a rule.
            UnsupportedError: a rule is of another kind than the group's first, whose state the servers
                keep.
        """
        for group, (rule, before) in enumerate(zip(rules, self._rules, strict=True)):
            if rule == before:
                continue
            if rule.kind != self._kinds[group]:
                raise UnsupportedError(
                    f"the momentum of parameter group {group} went from or to 0, and servers keep what the first step "
                    "needed; close() the session and attach again"
                )
            self._node.set_rule(group, rule)
            self._rules[group] = rule

    def begin(self, iteration: int) -> None:
        """Iteration `iteration` begins. No tensor may be in flight."""
        self._iteration = iteration
        self._engine.begin(iteration)

    def send(self, tensor: int) -> None:
        """Send this worker's gradient, which is in slot `tensor`, when the plan has it go; the new
        parameters will arrive there.
        """
        self._engine.ready((self._last - tensor,))

    def send_none(self, tensor: int) -> None:
        """Tell the servers that this worker has no gradient for `tensor` in this iteration."""
        self._engine.lacks(self._last - tensor)

    def flush(self) -> None:
        """Every tensor of this iteration was sent: nothing waits for others to go with it."""
        self._engine.flush()

    def has_arrived(self, tensor: int) -> bool:
        """Whether the new parameters of this iteration are in slot `tensor`, without waiting."""
        return self._engine.has_arrived(self._last - tensor)

    def late(self, tensors: Sequence[int]) -> set[int]:
        """Those of `tensors` for which `has_arrived` is false."""
        return {self._last - tensor for tensor in self._engine.late([self._last - tensor for tensor in tensors])}

    def wait_for(self, tensor: int) -> None:
        """Wait until the new parameters of this iteration are in slot `tensor`."""
        if not self.has_arrived(tensor):
            name = self.plan.tensors[self._last - tensor].name
            self._engine.wait_or_fail(
                self._last - tensor,
                self._timeout_s,
                lambda: f"iteration {self._iteration}: the new value of {name} did not come",
                self.refuse_departures,
                _LOOK_S,
            )

    def refuse_departures(self, ahead: int = 0) -> None:
        """Fail the job if a rank has closed its session whose gradients are still needed.

        Args:
            ahead: how many iterations after the present one they are needed.

        Raises:
            PeerDied: it has.
        """
        left = self._departures.before(self._iteration + ahead)
        if left is not None:
            rank, iterations = left
            text = (
                f"rank {rank} left the job after {iterations} iterations, and others wait for its part in iteration "
                f"{self._iteration + ahead}; do all ranks run the same number of steps?"
            )
            self.abort(text)
            raise PeerDied(text, rank)

    def leave(self) -> None:
        """This worker is about to close its session: it sends no more gradients."""
        self._departures.leave(self._iteration + 1)

    def failure(self) -> JobError | None:
        """The error that ended the job, on this rank or another; None while it runs."""
        return self._node.failure()

    def await_failure(self, timeout_s: float) -> None:
        """Wait until the job has failed, at most `timeout_s`. Does not raise."""
        with contextlib.suppress(JobError):
            # no tensor here is pushed with `notify`, so that only a failure ends this call
            self._node.take(timeout_s)

    def check(self) -> None:
        """Raise the error that ended the job, if there is one."""
        self._node.check()

    def abort(self, text: str) -> None:
        """End the job; the other workers' errors have `text`."""
        self._node.abort(text)

    def meet(self, what: str) -> None:
        """Wait until every worker has called `meet`, without a timeout; a worker that dies ends the
        wait. Once a minute one line says that this worker waits.

        A worker that left sooner would take away its server and its gradients, which others still
        need.

        Args:
            what: is waited for, as in "every rank to call close()".
        """
        self._node.push(self._meeting_id, notify=False)
        with saying(f"rank {self._departures.rank} waits for {what}"):
            self._node.wait(self._meeting_id, FOR_EVER_S)

    def close(self) -> None:
        """Close the connections."""
        self._departures.close()
        self._node.close()
