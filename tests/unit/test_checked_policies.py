"""`check_policy` finds each broken promise and says which it is."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from gradlane import policies
from gradlane.core.fields import need_int
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.policy import KnobRange, whole
from gradlane.testing.policies import check_policy

DOCS = Path(__file__).parents[2] / "docs"


class Sound(msgspec.Struct, frozen=True):
    """One message a tensor; each class below breaks one promise of it."""

    name: ClassVar[str] = "own"
    paper: ClassVar[str] = "none"
    differs: ClassVar[str] = "no"
    tunable: ClassVar[dict[str, KnobRange]] = {"most": KnobRange(1, 8, step=1)}

    most: int = 4

    def __post_init__(self):
        need_int("most", self.most, 1, 8)

    def messages(self, profile, network):
        return tuple(Message((whole(profile, tensor),)) for tensor in range(len(profile.tensors)))

    def plan(self, profile, network):
        return Plan(self.name, profile.model, profile.specs, self.messages(profile, network))


class NoObject:
    """As much of a policy as its words."""

    name = paper = differs = "own"


class WithColon(Sound, frozen=True):
    name: ClassVar[str] = "own:one"


class Wordless(Sound, frozen=True):
    differs: ClassVar[str] = ""


class Forgetful(Sound, frozen=True):
    def messages(self, profile, network):
        return super().messages(profile, network)[:3]


class Twice(Sound, frozen=True):
    def messages(self, profile, network):
        return (*super().messages(profile, network), Message((whole(profile, 0),)))


class Failing(Sound, frozen=True):
    def messages(self, profile, network):
        return super().messages(profile, network) if profile.backward_ns else 1 // profile.backward_ns


class Borrowed(Sound, frozen=True):
    def plan(self, profile, network):
        return policies.get("wfbp").plan(profile, network)


class Random(Sound, frozen=True):
    def messages(self, profile, network):
        return tuple(random.SystemRandom().sample(super().messages(profile, network), len(profile.tensors)))


class Hashing(Sound, frozen=True):
    def messages(self, profile, network):
        pieces = {spec.name: whole(profile, tensor) for tensor, spec in enumerate(profile.specs)}
        return tuple(Message((pieces[name],)) for name in set(pieces))


class Changing(Sound, frozen=True):
    def messages(self, profile, network):
        messages = super().messages(profile, network)
        msgspec.structs.force_setattr(profile, "model", "another")
        return messages


class Remembering(Sound, frozen=True):
    """Plans otherwise after it has planned before."""

    seen: ClassVar[list] = []

    def messages(self, profile, network):
        self.seen.append(profile)
        return tuple(msgspec.structs.replace(m, priority=len(self.seen) % 2) for m in super().messages(profile, network))


class Unreadable(Sound, frozen=True):
    marks: frozenset = frozenset({b"a"})
    most: object = 4


class Undeclared(Sound, frozen=True):
    tunable: ClassVar[dict[str, KnobRange]] = {"least": KnobRange(1, 8, step=1)}


class Reversed(Sound, frozen=True):
    tunable: ClassVar[dict[str, KnobRange]] = {"most": KnobRange(8, 1, step=1)}


class TooFar(Sound, frozen=True):
    tunable: ClassVar[dict[str, KnobRange]] = {"most": KnobRange(1, 9, step=1)}


class InsideAnElement(Sound, frozen=True):
    """Sound as it is given, and at one end of its range no more."""

    def messages(self, profile, network):
        if self.most == 4:
            return super().messages(profile, network)
        parts = []
        for tensor, spec in enumerate(profile.specs):
            cuts = (0, self.most, spec.size_bytes)
            parts += [Message((Slice(tensor, a, b - a),)) for a, b in itertools.pairwise(cuts)]
        return tuple(parts)


class Anything(Sound, frozen=True):
    def __post_init__(self):
        pass


class Nameless(Sound, frozen=True):
    def __post_init__(self):
        need_int("it", self.most, 1, 8)


class WrongError(Sound, frozen=True):
    def __post_init__(self):
        assert type(self.most) is int


class ByHand:
    """No `msgspec.Struct`: without knobs it is a policy."""

    name = paper = differs = "own"

    def plan(self, profile, network):
        return Sound().plan(profile, network)


class ByHandTunable(ByHand):
    tunable: ClassVar[dict[str, KnobRange]] = {"most": KnobRange(1, 8, step=1)}


@pytest.mark.parametrize("policy", [Sound(), ByHand()])
def test_a_sound_policy_passes(policy):
    check_policy(policy)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (NoObject(), "^NoObject has no plan; see gradlane.core.policy.Policy"),
        (WithColon(), "^policy own:one: a name with a colon"),
        (Wordless(), "^policy own: differs is text for tables, but InputError: differs: got ''"),
        (Forgetful(), "moves every byte of every gradient once, but PlanError: t3: moves 0 bytes, expected"),
        (Twice(), "moves every byte of every gradient once, but PlanError: t0: got bytes from 0 moved twice"),
        (Failing(), "moves every byte of every gradient once, but ZeroDivisionError"),
        (Borrowed(), "its plan says whose it is, but plan.policy is 'wfbp', expected 'own'"),
        (Random(), "the same profile and network give the same plan, but its messages differ: "),
        (Remembering(), "the same profile and network give the same plan, but its messages differ: "),
        (Hashing(), "another process makes the same plan, but the fingerprints here are "),
        (Changing(), "it leaves the profile and the network as they are, but it has changed them"),
        (Unreadable(), "its knobs can be written as JSON and read, but "),
        (Undeclared(), "what it declares tunable are knobs of its own, with their ranges, but least is no field"),
        (Reversed(), "with their ranges, but most: the range ends at 1, below its beginning 8"),
        (TooFar(), "valid at both ends of what it declares tunable, but InputError: most: got 9"),
        (InsideAnElement(), "valid at both ends of what it declares tunable, but PlanError: .* is cut inside an element"),
        (Anything(), r"knob most='4MiB' is accepted, expected InputError; check it in __post_init__"),
        (Nameless(), "knob most='4MiB' is refused without its name: it: got '4MiB'"),
        (WrongError(), r"knob most='4MiB' raises AssertionError\(.*\), expected InputError"),
        (ByHandTunable(), "only a msgspec.Struct has knobs to tune"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_promise_is_found_and_named(policy, reason):
    with pytest.raises(AssertionError, match=reason):
        check_policy(policy)


def test_without_hypothesis_the_error_says_what_to_install():
    program = """
import sys
sys.modules["hypothesis"] = None
try:
    import gradlane.testing.policies
except ImportError as error:
    print("pip install 'gradlane[testing]'" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_torch_is_imported_for_backends_alone():
    program = """
import sys
sys.modules["torch"] = None
import gradlane.testing.generators, gradlane.testing.policies, gradlane.testing.searches, gradlane.testing.fabrics
import gradlane.testing.logs, gradlane.testing.oracles
try:
    import gradlane.testing.backends
except ImportError:
    print("needs torch")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "needs torch\n"


def test_the_policy_of_the_page_passes_the_test_of_the_page(tmp_path):
    policy, test = re.findall(r"```python\n(.*?)```", (DOCS / "policies.md").read_text(), re.DOTALL)
    (tmp_path / "my_policy.py").write_text(policy)
    (tmp_path / "test_my_policy.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_my_policy.py"]
    same = {**os.environ, "CI": "1"}  # hypothesis tries the same examples every time
    done = subprocess.run(command, cwd=tmp_path, env=same, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
