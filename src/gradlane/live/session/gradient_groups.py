"""GradientGroups: small gradients that are ready at nearly the same time are handled together.

To put a gradient into its slot, and to say that it is ready, costs the interpreter microseconds,
however small the gradient is. Done for a group at once, it costs each of them a part of that. Only
small gradients wait, only for neighbours, and for as long as the transport would let them wait for
one another anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradlane.core.plan import Plan

_WITHIN_NS = 300_000  # between the first and the last gradient of a group, as they were measured
_MOST_BYTES = 64 << 10  # of a group; so much the node also lets wait for more to go with it


class GradientGroups:
    """The groups of one plan, and which of their gradients are there in this backward pass.

    Args:
        plan: in force; its tensors are in order of readiness.
        dtypes: of the tensors' slots, which may be wider than what travels.
        ready_ns: by tensor name, when its gradient was ready in a backward pass as measured; None
            if that is unknown, and then every gradient is a group by itself.

    Attributes:
        members: the tensors of each group, in the plan's order.
    """

    def __init__(self, plan: Plan, dtypes: Sequence[object], ready_ns: Mapping[str, int] | None) -> None:
        self.members = _alone(len(plan.tensors)) if ready_ns is None else _neighbours(plan, dtypes, ready_ns)
        self._index()

    def _index(self) -> None:
        self._of = [0] * sum(map(len, self.members))
        for group, members in enumerate(self.members):
            for tensor in members:
                self._of[tensor] = group
        self._sizes = [len(members) for members in self.members]
        self._missing = list(self._sizes)

    def begin(self) -> None:
        """A backward pass begins, without a gradient."""
        self._missing = list(self._sizes)

    def add(self, tensor: int) -> Sequence[int]:
        """The gradient of `tensor` is complete, for the only time in this pass.

        Returns:
            The group, now that all its gradients are there; nothing before that.
        """
        group = self._of[tensor]
        missing = self._missing[group] = self._missing[group] - 1
        return () if missing else self.members[group]

    def is_shared(self, tensor: int) -> bool:
        """Whether the gradient of `tensor` waits for others."""
        return self._sizes[self._of[tensor]] > 1

    def dissolve(self, tensors: Sequence[int]) -> None:
        """Handle gradients by themselves from now on that were in a group with one of `tensors`.

        Within a pass, no group that has begun is complete after this: what it has is left for the
        end of the pass.

        Args:
            tensors: that got no gradient in a pass, so that others had to wait for its end, or that
                must not wait.
        """
        spoilt = {self._of[tensor] for tensor in tensors if self.is_shared(tensor)}
        if spoilt:
            kept = [members for group, members in enumerate(self.members) if group not in spoilt]
            self.members = [*kept, *([tensor] for group in spoilt for tensor in self.members[group])]
            self._index()


def _alone(tensors: int) -> list[list[int]]:
    return [[tensor] for tensor in range(tensors)]


def _neighbours(plan: Plan, dtypes: Sequence[object], ready_ns: Mapping[str, int]) -> list[list[int]]:
    groups: list[list[int]] = []
    began_ns = size_bytes = 0
    for tensor, spec in enumerate(plan.tensors):
        at_ns = ready_ns[spec.name]
        first = groups[-1][0] if groups else tensor
        fits = size_bytes + spec.size_bytes <= _MOST_BYTES and abs(at_ns - began_ns) <= _WITHIN_NS
        if groups and fits and dtypes[tensor] == dtypes[first]:
            groups[-1].append(tensor)
            size_bytes += spec.size_bytes
        else:
            groups.append([tensor])
            began_ns, size_bytes = at_ns, spec.size_bytes
    return groups
