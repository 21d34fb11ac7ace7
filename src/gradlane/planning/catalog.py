"""The catalog: looks policies up by name.

It has the policies of `gradlane.policies`; `searched`, which needs them and the simulator; and
users' own, named by where their class is: "module:Class" or "file.py:Class". Values for knobs may follow any name, as in
"bytescheduler:partition_bytes=4MiB:credit_bytes=16MiB".
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import msgspec
from msgspec import UNSET

from gradlane import policies
from gradlane.core.backends import BackendName
from gradlane.core.fields import did_you_mean, need, need_name
from gradlane.core.place import Place
from gradlane.core.policy import KnobRange, Policy, plans_with_bus, replans, tunable
from gradlane.core.records.search_log import AUTO
from gradlane.errors import InputError
from gradlane.planning.searched import Searched
from gradlane.units import parse_bytes


class Setting(NamedTuple):
    """A policy as users write it.

    Attributes:
        name: of the catalog, or the place of a class of the user's own.
        knobs: the values that follow it.
    """

    name: str
    knobs: dict[str, Any]


def parse(text: str) -> Setting:
    """Parse NAME, or NAME:KNOB=VALUE with as many knobs as are wanted.

    Raises:
        InputError: a value is of no use, or a knob is there twice.
    """
    name, *after = text.split(":")
    knobs: dict[str, Any] = {}
    while after and "=" not in after[0]:
        name = f"{name}:{after.pop(0)}"
    for part in after:
        knob, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"policy {name}: got {part!r} after its knobs, expected {part}=VALUE")
        if knob in knobs:
            raise InputError(f"policy {name}: got knob {knob!r} twice, expected it once")
        try:
            knobs[knob] = parse_value(value)
        except InputError as error:
            raise InputError(f"{name}: {knob}: {str(error).removeprefix('size: ')}") from None
    return Setting(name, knobs)


def parse_value(text: str) -> float | int | str:
    """Parse a knob's value: a whole number, a decimal such as 0.1 or 1e-7, a word such as ring, or else a size.

    Raises:
        InputError: it is none of these.
    """
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"-?(\d*\.\d+|\d+\.?\d*e[+-]?\d+)", text):
        return float(text)
    return text if re.fullmatch(r"[a-zA-Z_][\w -]*", text) else parse_bytes(text)


def spelled(policy: Policy) -> str:
    """Spell `policy` as `parse` reads it: its name, and the knobs that differ from their defaults.

    A knob is spelled if the policy has its value in an attribute of its name, as each field of a `msgspec.Struct` is one.
    """
    usual = _knobs_of(type(policy)) or {}
    values = {knob: getattr(policy, knob, None) for knob in usual}
    changed = {knob: value for knob, value in values.items() if isinstance(value, _SPELLED) and value != usual[knob]}
    return ":".join((policy.name, *(f"{knob}={_written(knob, value)}" for knob, value in changed.items())))


_SPELLED = (bool, int, float, str)


def _written(knob: str, value: Any) -> str:
    """`value` as `parse_value` reads it without rounding."""
    if isinstance(value, bool):
        return str(value).lower()
    if knob.endswith("_bytes") and isinstance(value, int) and value:
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value % size == 0:
                return f"{value // size}{unit}"
    return str(value)


def names(backend: BackendName | None = None, external: bool = False, with_bus: bool = False) -> tuple[str, ...]:
    """Names of policies, `searched` last; the arguments are those of `policies.names`."""
    return (*policies.names(backend, external, with_bus), Searched.name)


def carried_at(place: Place) -> tuple[str, ...]:
    """Names of the policies that `place` carries."""
    return names(place.backend, place.has_external_servers, place.network.bus is not UNSET)


def get(name: str, **knobs: Any) -> Policy:
    """The policy of a name.

    Args:
        name: a name of the catalog, "module:Class" or "file.py:Class", perhaps with knobs after it, see `parse`.
        knobs: more values for the policy's knobs; the others keep their defaults.

    Raises:
        InputError: the policy does not exist (the message lists those that do), lacks a part of
            `Policy`, or refuses a knob.
    """
    name, written = parse(name)
    twice = sorted(written.keys() & knobs.keys())
    if twice:
        raise InputError(f"policy {name}: got knob {twice[0]!r} twice, expected it once")
    knobs = {**written, **knobs}
    if is_own(name):
        return _own(name, knobs)
    if name != Searched.name:
        if name == AUTO:
            raise InputError(f"policy: got {AUTO}, which tries plans in a running job; expected one of {', '.join(names())}")
        if name.endswith(".py"):
            kind = next(iter(_classes_in(_module(name))), "Class")
            raise InputError(f"policy: got a file alone, {name}, expected a class in it too, as {name}:{kind}")
        if name not in policies.names():
            raise InputError(
                f"policy: got {name!r}{did_you_mean(name, (*names(), AUTO))}, expected one of {', '.join(names())}; or a class "
                "of your own, as file.py:Class"
            )
        return policies.get(name, **knobs)
    _check_knobs(name, Searched, knobs)
    return Searched(**knobs)


def is_own(name: str) -> bool:
    """Whether `name` says where a class is, and is not a name of the catalog."""
    return ":" in name


def is_users(policy: Policy) -> bool:
    """Whether the class of `policy` is a user's own."""
    return type(policy).__module__.partition(".")[0] != "gradlane"


def _own(place: str, knobs: dict[str, Any]) -> Policy:
    where, _, kind = place.rpartition(":")
    if where in names():
        raise InputError(f"policy: got {place!r}, expected {where}, or {where}:{kind}=VALUE for a knob")
    module = _module(where)
    made, there = getattr(module, kind, None), _classes_in(module)
    if not isinstance(made, type):
        what = f"which {where} does not have" if made is None else "which is no class"
        expected = ", ".join(there) or "it has none"
        raise InputError(f"policy: got {kind!r}{did_you_mean(kind, there)}, {what}, expected a class with a plan: {expected}")
    if kind not in there:
        _refuse_without_parts(place, made)
    _check_knobs(place, made, knobs)
    try:
        policy = made(**_typed(place, made, knobs))
    except InputError:
        raise
    except Exception as error:  # of the class, which may do anything
        text = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        raise InputError(f"policy {place}: {text}") from error
    if not isinstance(policy, Policy):
        _refuse_without_parts(place, policy)
    _check_attributes(place, policy)
    if policy.name in (*names(), AUTO) and is_users(policy):
        raise InputError(f"policy {place}: got the name {policy.name!r}, which a policy of gradlane's has, expected another")
    return policy


def _check_attributes(place: str, policy: Policy) -> None:
    """Raise `InputError` for a class attribute of `Policy` that is of another kind."""
    need_name(f"policy {place}: its name", policy.name)
    for flag, value in (("replans", replans(policy)), ("plans_with_bus", plans_with_bus(policy))):
        need(isinstance(value, bool), f"policy {place}: {flag}", value, "True or False")
    ranges, knobs = tunable(policy), _knobs_of(type(policy)) or {}
    is_one = isinstance(ranges, Mapping) and all(isinstance(each, KnobRange) for each in ranges.values())
    need(is_one, f"policy {place}: tunable", ranges, "a KnobRange for each knob that a search may set")
    for knob in ranges:
        need(knob in knobs, f"policy {place}: tunable", knob, f"one of its knobs: {', '.join(knobs) or 'it has none'}")


def _refuse_without_parts(place: str, policy: object) -> NoReturn:
    lacks = ", ".join(name for name in ("name", "paper", "differs", "plan") if not hasattr(policy, name))
    raise InputError(f"policy {place}: got a class without {lacks}; see gradlane.core.policy.Policy")


def _check_knobs(place: str, made: type, knobs: dict[str, Any]) -> None:
    """Raise `InputError` for a knob that the class `made` does not have, or one without a value."""
    known = _knobs_of(made)
    if known is None:
        return
    for knob in sorted(knobs):
        if knob not in known:
            expected = ", ".join(known) or "none: it has no knobs"
            raise InputError(f"policy {place}: got knob {knob!r}{did_you_mean(knob, known)}, expected {expected}")
    for knob, default in known.items():
        if default is _NO_DEFAULT and knob not in knobs:
            raise InputError(f"policy {place}: got no value for its knob {knob!r}, expected a default in the class")


_NO_DEFAULT = inspect.Parameter.empty


def _knobs_of(made: type) -> dict[str, Any] | None:
    """The defaults of a class's knobs, by name; None if it takes any.

    Not by the signature of a Struct, for which msgspec evaluates annotations. A name in one may be imported for type checkers
    alone.
    """
    if issubclass(made, msgspec.Struct):
        names, defaults = made.__struct_fields__, made.__struct_defaults__
        lacking = len(names) - len(defaults)
        values = (_NO_DEFAULT if each is msgspec.NODEFAULT else each for each in defaults)
        return dict(zip(names, [*[_NO_DEFAULT] * lacking, *values], strict=True))
    known = inspect.signature(made).parameters
    if any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in known.values()):
        return None
    return {knob: each.default for knob, each in known.items()}


_EXPECTED = {bool: "true or false", int: "a whole number, or a size such as 4MiB", float: "a number", str: "a word"}


def _typed(place: str, made: type, knobs: dict[str, Any]) -> dict[str, Any]:
    """`knobs` for the class `made`, with `true` and `false` as a bool where it has one.

    Raises:
        InputError: a value is of another type than the fields of a `msgspec.Struct` are.
    """
    kinds: dict[str, Any] = {}
    with contextlib.suppress(NameError):  # an annotation of a name that is imported for type checkers alone
        fields = msgspec.structs.fields(made) if issubclass(made, msgspec.Struct) else ()
        kinds = {field.name: field.type for field in fields if isinstance(field.type, type)}
    known, typed = _knobs_of(made) or {}, dict(knobs)
    for knob, value in knobs.items():
        kind = kinds.get(knob)
        if value in ("true", "false") and (kind is bool or isinstance(known.get(knob), bool)):
            typed[knob] = value == "true"
        elif kind in _EXPECTED:
            try:
                typed[knob] = msgspec.convert(value, kind)
            except msgspec.ValidationError:
                raise InputError(f"policy {place}: {knob}: got {value!r}, expected {_EXPECTED[kind]}") from None
    return typed


def _classes_in(module: ModuleType) -> list[str]:
    """Names of the classes that may be policies."""
    return [name for name, each in vars(module).items() if isinstance(each, type) and callable(getattr(each, "plan", None))]


def _module(where: str) -> ModuleType:
    """The module in the file `where`, or the importable module of that name."""
    try:
        if not where.endswith(".py"):
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
            return importlib.import_module(where)
        folder = str(Path(where).resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # it may import its neighbours; last, so that nothing of the script is hidden
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
