"""Values: a worker's view of the parameters that servers keep. Each parameter is a tensor of the node, in a slot of its
own: this worker's gradient on the way there, parameters when they are back.

It has no thread: the node's own moves the bytes, and whoever needs a value waits for it in the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from gradlane.errors import JobError
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.transport import Node, Part, Rule

_FOR_EVER_S = 10**6.0


class Sent:
    """A gradient that has been sent, as it stood in `.grad`; holding it keeps autograd from using its memory again."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient, self._version = gradient, gradient._version

    def stands_in(self, param: torch.nn.Parameter) -> bool:
        """Whether `.grad` is what was sent, unchanged."""
        return param.grad is self._gradient and self._gradient._version == self._version


class Values:
    """Parameters `params`, the most urgent first, of which `groups[i]` is the group of the i-th.

    node: joined, with no tensor defined yet. Raises what waiting for the others may raise; so does every method that waits.
    """

    def __init__(
        self,
        node: Node,
        params: Sequence[torch.nn.Parameter],
        groups: Sequence[int],
        rules: Sequence[Rule],
        staleness: int,
        timeout_s: float,
    ) -> None:
        self._node, self._timeout_s = node, timeout_s
        self._kinds = [rule.kind for rule in rules]
        self._parts = [rules[group].parts for group in groups]
        self._rules: list[Rule | None] = [None] * len(rules)
        self.slots = GradientBuffers(params).slots
        for tensor, (slot, group) in enumerate(zip(self.slots, groups, strict=True)):
            node.define_updated(
                tensor,
                slot.data_ptr(),
                slot.numel() * slot.element_size(),
                rules[group],
                staleness=staleness,
                group=group,
                priority=tensor,
            )
        self._meeting = torch.zeros(1)
        node.define(len(params), self._meeting.data_ptr(), 4, "float32")
        with torch.no_grad():
            torch._foreach_copy_(self.slots, [param.detach() for param in params])
        for tensor in range(len(params)):
            node.push(tensor, notify=False)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        for tensor in range(len(self.slots)):
            self._node.wait(tensor, self._timeout_s)

    def _having(self, part: Part) -> list[int]:
        return [tensor for tensor, parts in enumerate(self._parts) if part == "parameters" or part in parts]

    def place(self, part: Part, values: Sequence[torch.Tensor]) -> None:
        """Rank 0's `values`, by tensor, become `part` of what the servers keep, where they keep it; none may be under way."""
        having = self._having(part)
        with torch.no_grad():
            for tensor in having:
                self.slots[tensor].copy_(values[tensor])
                self._node.place(tensor, part)
        self._wait_for_all()

    def fetch(self, part: Part) -> dict[int, torch.Tensor]:
        """`part` of what the servers keep, by tensor, where they keep it; none may be under way."""
        having = self._having(part)
        for tensor in having:
            self._node.fetch(tensor, part)
        self._wait_for_all()
        return {tensor: self.slots[tensor].clone() for tensor in having}

    def govern(self, rules: Sequence[Rule]) -> None:
        """Every later gradient is applied by `rules`; none may be under way.

        Raises `JobError` for a rule of another kind than the first: servers keep what that one needs.
        """
        for group, (rule, before) in enumerate(zip(rules, self._rules, strict=True)):
            if rule == before:
                continue
            if rule.kind != self._kinds[group]:
                raise JobError(
                    f"the momentum of parameter group {group} went from or to 0, and servers keep what the first step "
                    "needed; close() the session and attach again"
                )
            self._node.set_rule(group, rule)
            self._rules[group] = rule

    def send(self, tensor: int) -> None:
        """Slot `tensor` holds this worker's gradient."""
        self._node.push(tensor, notify=False)

    def send_none(self, tensor: int) -> None:
        """This worker has no gradient for `tensor` in this iteration."""
        self._node.push(tensor, notify=False, quiet=True)

    def has_arrived(self, tensor: int) -> bool:
        """Whether slot `tensor` holds parameters, without waiting."""
        return self._node.is_done(tensor)

    def wait_for(self, tensor: int) -> None:
        """Return when slot `tensor` holds parameters."""
        self._node.wait(tensor, self._timeout_s)

    def failure(self) -> JobError | None:
        """What ended the job here or elsewhere, or None."""
        return self._node.failure()

    def await_failure(self, timeout_s: float) -> None:
        """Return when the job has failed, or after `timeout_s`."""
        with contextlib.suppress(JobError):
            self._node.take(timeout_s)  # nothing is ever pushed with `notify`: only a failure ends it

    def check(self) -> None:
        """Raise the failure, if there is one."""
        self._node.check()

    def abort(self, text: str) -> None:
        """This worker cannot go on: every other hears `text`."""
        self._node.abort(text)

    def meet(self) -> None:
        """Return when every worker has come to this call: none may leave while others need its server, or its gradients.

        However far ahead this one is, it waits; a worker that dies ends it.
        """
        self._node.push(len(self.slots), notify=False)
        self._node.wait(len(self.slots), _FOR_EVER_S)

    def close(self) -> None:
        """End the connections."""
        self._node.close()
