"""MG-WFBP: merge gradients by the paper's greedy rule."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import merge
from gradlane.core.profile import Profile


class MgWfbp(msgspec.Struct, frozen=True):
    """Merge a layer with the next if that is ready within a startup (Algorithm 1, Eq. 38).

    A merge saves one startup and delays the earlier layer; the rule merges if the delay is shorter.

    Wins where there are many small tensors and a startup is long, as on many workers, and no update
    can be deferred.

    Differs from the paper: layers are tensors, as those are what becomes ready. t_c comes from the
    fitted network, which may have several segments; a is its startup for large messages. Theorem 1
    calls the rule optimal; it is not, see `mg-wfbp-exact`.
    """

    name: ClassVar[str] = "mg-wfbp"
    paper: ClassVar[str] = "MG-WFBP (TPDS '21) Algorithm 1"
    differs: ClassVar[str] = "by tensor, not by layer; the rule is not optimal as its Theorem 1 says"

    def plan(self, profile: Profile, network: Network) -> Plan:
        groups = merge_greedily(profile, network)
        messages = tuple(message for group in groups for message in merge(profile, group))
        return Plan(self.name, profile.model, profile.specs, messages)


def merge_greedily(profile: Profile, network: Network) -> list[list[int]]:
    """Group tensors by Algorithm 1.

    The paper numbers layers from the input, so its loop from L to 2 is readiness order. A merged
    layer costs nothing itself (t_c = 0) and adds its bytes to the next. Recomputing all start times
    after each merge (line 13) changes only those after the merged layer, so one running end time is
    enough.

    Returns:
        Groups of tensor indices, in readiness order.
    """
    groups: list[list[int]] = [[]]
    size_bytes = 0
    network_free_ns = 0
    for tensor, seen in enumerate(profile.tensors):
        groups[-1].append(tensor)
        size_bytes += seen.spec.size_bytes
        if tensor + 1 == len(profile.tensors):
            break
        start_ns = max(network_free_ns, seen.ready_ns)  # tau_c, Eq. 7
        following = profile.tensors[tensor + 1]
        # a message has one dtype, so merging two dtypes would save no startup
        if following.spec.dtype == seen.spec.dtype and following.ready_ns - start_ns < network.startup_ns:  # Eq. 38
            continue
        network_free_ns = start_ns + network.cost_ns(size_bytes)
        groups.append([])
        size_bytes = 0
    return groups
