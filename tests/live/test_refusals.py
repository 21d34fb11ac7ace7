"""What a backend cannot honour is refused before anything is sent."""

from __future__ import annotations

import pytest

from gradlane import policies
from gradlane.core.backends import BACKENDS, refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import PlanError, UnsupportedError
from gradlane.live.torch_versions import NEWEST_TESTED, require_release, why_untested

ONE = Profile("one", "none", (TensorProfile(TensorSpec("a", 8), 0, 0),), (Layer("only", 1),), 0)


REFUSED = [(name, backend) for backend in BACKENDS for name in sorted(set(policies.names()) - set(policies.names(backend)))]


@pytest.mark.parametrize(("name", "backend"), REFUSED)
def test_a_plan_for_another_transport_is_refused_by_name(name, backend):
    with pytest.raises(PlanError, match=rf"^plan {name}: .*gradlane policies says which policies {backend} carries"):
        refuse_what_cannot_be_done(policies.get(name).plan(ONE, Network.line(2, 0, 10**9)), backend)


def test_servers_apart_refuse_half_a_sum_and_owners():
    assert [name for name, backend in REFUSED if backend == "server"] == []
    assert set(policies.names("server")) - set(policies.names("server", external=True)) == {"dear", "owners"}
    plan = policies.get("dear").plan(ONE, Network.line(2, 0, 10**9))
    refuse_what_cannot_be_done(plan, "server")
    with pytest.raises(PlanError, match=r"messages\[0\] is split into push and pull, .* expected .* \(servers=0,"):
        refuse_what_cannot_be_done(plan, "server", external=True)


def test_what_a_release_of_pytorch_cannot_do_is_refused_by_name():
    require_release((2, 4), "a session")
    with pytest.raises(UnsupportedError, match=r"^a session on cuda: got PyTorch .*, expected 99\.1 or newer"):
        require_release((99, 1), "a session on cuda")


def test_a_release_of_pytorch_that_was_never_tested_is_named():
    assert why_untested() is why_untested(NEWEST_TESTED) is None
    assert why_untested((99, 0)).startswith(f"PyTorch 99.0 is newer than {NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}, ")
