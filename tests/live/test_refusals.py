"""What torch.distributed cannot honour is refused before anything is sent."""

from __future__ import annotations

import pytest

from gradlane import policies
from gradlane.core.network import Network
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import PlanError
from gradlane.live.backend import refuse_what_all_reduce_cannot_do

ONE = Profile("one", "none", (TensorProfile(TensorSpec("a", 8), 0, 0),), (Layer("only", 1),), 0)


@pytest.mark.parametrize("name", sorted(set(policies.names()) - set(policies.names("all-reduce"))))
def test_a_plan_for_another_transport_is_refused_by_name(name):
    with pytest.raises(PlanError, match=rf"^plan {name}: .*gradlane policies says which policies all-reduce carries"):
        refuse_what_all_reduce_cannot_do(policies.get(name).plan(ONE, Network.line(2, 0, 10**9)))
