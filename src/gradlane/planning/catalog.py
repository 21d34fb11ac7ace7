"""The catalog: looks policies up by name.

It has the policies of `gradlane.policies`; `searched`, which needs them and the simulator; and
users' own, named by where their class is: "module:Class" or "file.py:Class".
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import UNSET

from gradlane import policies
from gradlane.core.backends import BackendName
from gradlane.core.fields import did_you_mean
from gradlane.core.place import Place
from gradlane.core.policy import Policy
from gradlane.core.records.search_log import AUTO
from gradlane.errors import InputError
from gradlane.planning.searched import Searched


def names(backend: BackendName | None = None, external: bool = False, with_bus: bool = False) -> tuple[str, ...]:
    """Names of policies, `searched` last; the arguments are those of `policies.names`."""
    return (*policies.names(backend, external, with_bus), Searched.name)


def carried_at(place: Place) -> tuple[str, ...]:
    """Names of the policies that `place` carries."""
    return names(place.backend, place.has_external_servers, place.network.bus is not UNSET)


def get(name: str, **knobs: Any) -> Policy:
    """The policy of a name.

    Args:
        name: a name of the catalog, "module:Class" or "file.py:Class".
        knobs: values for the policy's knobs; the others keep their defaults.

    Raises:
        InputError: the policy does not exist (the message lists those that do), lacks a part of
            `Policy`, or refuses a knob.
    """
    if is_own(name):
        return _own(name, knobs)
    if name != Searched.name:
        if name == AUTO:
            raise InputError(f"policy: got {AUTO}, which tries plans in a running job; expected one of {', '.join(names())}")
        if name not in policies.names():
            raise InputError(
                f"policy: got {name!r}{did_you_mean(name, (*names(), AUTO))}, expected one of {', '.join(names())}; or a class "
                "of your own, as file.py:Class"
            )
        return policies.get(name, **knobs)
    unknown = sorted(set(knobs) - set(Searched.__struct_fields__))
    if unknown:
        known = Searched.__struct_fields__
        raise InputError(
            f"policy {name}: got knob {unknown[0]!r}{did_you_mean(unknown[0], known)}, expected {', '.join(known)}"
        )
    return Searched(**knobs)


def is_own(name: str) -> bool:
    """Whether `name` says where a class is, and is not a name of the catalog."""
    return ":" in name


def _own(place: str, knobs: dict[str, Any]) -> Policy:
    where, _, kind = place.rpartition(":")
    module = _module(where)
    made = getattr(module, kind, None)
    if made is None:
        there = ", ".join(name for name, each in vars(module).items() if isinstance(each, type) and hasattr(each, "plan"))
        raise InputError(
            f"policy: got {kind!r}, which {where} does not have, expected a class with a plan: {there or 'it has none'}"
        )
    try:
        policy = made(**knobs)
    except InputError:
        raise
    except Exception as error:  # of the class, which may do anything
        what = error if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        raise InputError(f"policy {place}: {what}") from error
    if not isinstance(policy, Policy):
        lacks = ", ".join(name for name in ("name", "paper", "differs", "plan") if not hasattr(policy, name))
        raise InputError(f"policy {place}: got a class without {lacks}; see gradlane.core.policy.Policy")
    if policy.name in (*names(), AUTO) and type(policy).__module__.partition(".")[0] != "gradlane":
        raise InputError(f"policy {place}: got the name {policy.name!r}, which a policy of gradlane's has, expected another")
    return policy


def _module(where: str) -> ModuleType:
    """The module in the file `where`, or the importable module of that name."""
    try:
        if not where.endswith(".py"):
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(f"_own_{Path(where).stem}", where)
        if spec is None or spec.loader is None:
            raise ImportError(f"{where} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        # the class statement of a msgspec.Struct looks its module up in sys.modules
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise InputError(
            f"policy: got {where!r}, which cannot be imported from here ({error}), expected a module or file of yours"
        ) from None
