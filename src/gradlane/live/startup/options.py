"""AttachOptions: all options of `attach`, validated, with those of `gradlane launch` taking
precedence.

A script passes keywords and a launcher passes `LaunchOptions` in one environment variable;
`AttachOptions.of` alone merges them. `AttachOptions.terms` derives from the result what ranks must
agree on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec
from msgspec import UNSET

from gradlane import policies
from gradlane.core import files
from gradlane.core.backends import ALGORITHMS, BACKENDS, Algorithm, BackendName, SummationOrder, why_not
from gradlane.core.fields import is_number, need, need_int
from gradlane.core.launch_options import LAUNCH_VARIABLE, STALL_TIMEOUT_S, LaunchOptions, need_stall_timeout
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.core.records.search_log import AUTO
from gradlane.core.wire_dtype import wire_dtype_of
from gradlane.errors import FormatError, InputError
from gradlane.live.session.verification import VerifyOptions
from gradlane.planning import catalog
from gradlane.planning.tuning import TuneOptions
from gradlane.transport import NodeOptions
from gradlane.transport.host import is_wanted

if TYPE_CHECKING:
    import torch


class AttachKeywords(TypedDict, total=False):
    """The keywords of `attach`, which documents them. Defaults are those of the options below."""

    backend: BackendName | None
    algorithm: Algorithm | None
    packet_bytes: int | None
    summation_order: SummationOrder | None
    servers: int
    weight: int
    wire_dtype: torch.dtype | str | None
    network: Network | None
    profile: Profile | None
    profile_iterations: int | None
    order: Literal["planned", "coordinator"]
    cross_barrier: bool | None
    broadcast_buffers: bool | Literal["forward"]
    timeout: float | None
    stall_timeout: float
    tune: bool | TuneOptions
    knobs: str | Path | None
    verify: bool | VerifyOptions
    check_finite: bool
    keep_log: bool


_MOST_TIMEOUT_S = 31_536_000
"""A year, in seconds: the most that a script may wait for another rank."""


def _need_kind(field: str, value: object, kind: type) -> None:
    """Raise `InputError` unless `value` is of `kind` or None."""
    name = f"gradlane.{kind.__name__}"
    is_one = value is None or isinstance(value, kind)
    need(is_one, field, value, f"a {name} (gradlane.core.files.read(path, {name}) reads one from a file)")


def _need_one_of(field: str, value: object, *expected: object) -> None:
    """Raise `InputError` unless `value` is one of `expected`, which 0 and 1 are not for False and True."""
    found = any(value is each or (isinstance(each, str) and value == each) for each in expected)
    need(found, field, value, f"{', '.join(map(repr, expected[:-1]))} or {expected[-1]!r}")


class CarrierOptions(msgspec.Struct, frozen=True):
    """What carries the messages.

    Args:
        backend, algorithm, packet_bytes, summation_order, servers, weight: as for `attach`.
        servers_store: "host:port" of the store at which external servers meet the job; None for the
            job's own.
        wire_dtype: "bfloat16" or "float16", as which float32 gradients travel; None for float32.
        shared_memory: whether servers beside the ranks sum through the memory of a host what its ranks have. Only the
            environment says no to it.
    """

    backend: BackendName | None = None
    packet_bytes: int | None = None
    summation_order: SummationOrder | None = None
    servers: int = 0
    servers_store: str | None = None
    weight: int = 1
    wire_dtype: str | None = None
    shared_memory: bool = True
    algorithm: Algorithm | None = None

    def __post_init__(self) -> None:
        need(self.backend in (None, *BACKENDS), "backend", self.backend, "'all-reduce' or 'server'")
        need(self.algorithm in (None, *ALGORITHMS), "algorithm", self.algorithm, "'flat' or 'hierarchical'")
        need_int("weight", self.weight, 1, 8)
        if self.backend != "server":
            need(self.packet_bytes is None, "packet_bytes", self.packet_bytes, "none: packets are of backend='server'")
            need(self.summation_order is None, "summation_order", self.summation_order, "none: it is of backend='server'")
            need(self.servers == 0, "servers", self.servers, "none: they are of backend='server'")
            return
        need_int("servers", self.servers, 0, 65535)
        need(self.summation_order in (None, "arrival", "rank"), "summation_order", self.summation_order, "'arrival' or 'rank'")
        if self.packet_bytes is not None:
            need_int("packet_bytes", self.packet_bytes, 64, 512 << 10)
            need(self.packet_bytes % 64 == 0, "packet_bytes", self.packet_bytes, "a multiple of 64")


class MeasuringOptions(msgspec.Struct, frozen=True):
    """What plans are made from; what is None is measured. Fields as for `attach`."""

    network: Network | None = None
    profile: Profile | None = None
    profile_iterations: int | None = None

    def __post_init__(self) -> None:
        _need_kind("network", self.network, Network)
        _need_kind("profile", self.profile, Profile)
        if self.profile_iterations is not None:
            need_int("profile_iterations", self.profile_iterations, 1, 1_000_000)


class AdaptingOptions(msgspec.Struct, frozen=True):
    """How knobs are tuned while the job trains, and the file that they are read from and written
    to.
    """

    tune: TuneOptions | None = None
    knobs: Path | None = None

    def __post_init__(self) -> None:
        is_one = self.tune is None or isinstance(self.tune, TuneOptions)
        need(is_one, "tune", self.tune, "True, False or a TuneOptions")

    @property
    def given(self) -> bool:
        """Whether the policy's knobs are to be tuned or read."""
        return self.tune is not None or self.knobs is not None


class SteppingOptions(msgspec.Struct, frozen=True):
    """How a training step runs. Fields as for `attach`; `timeout` and `stall_timeout` in seconds."""

    order: Literal["planned", "coordinator"] = "planned"
    cross_barrier: bool | None = None
    broadcast_buffers: bool | Literal["forward"] = True
    timeout: float | None = None
    stall_timeout: float = STALL_TIMEOUT_S
    verify: VerifyOptions | None = None
    check_finite: bool = False
    keep_log: bool = False

    def __post_init__(self) -> None:
        given = self.timeout
        fits = given is None or (is_number(given) and 0 < given <= _MOST_TIMEOUT_S)
        need(fits, "timeout", given, f"a number of seconds, more than 0 and at most {_MOST_TIMEOUT_S}, or None")
        need_stall_timeout("stall_timeout", self.stall_timeout)
        _need_one_of("order", self.order, "planned", "coordinator")
        _need_one_of("cross_barrier", self.cross_barrier, True, False, None)
        _need_one_of("broadcast_buffers", self.broadcast_buffers, True, False, "forward")
        is_one = self.verify is None or isinstance(self.verify, VerifyOptions)
        need(is_one, "verify", self.verify, "True, False or a gradlane.VerifyOptions")
        _need_one_of("check_finite", self.check_finite, True, False)
        _need_one_of("keep_log", self.keep_log, True, False)


class FolderOptions(msgspec.Struct, frozen=True):
    """Folders to which each rank writes its timeline, and rank 0 the profile, when a session closes; None for none.

    Beside the profile is the network: with a timeline where the last plan ran, else that of an all-reduce, if there is one.
    """

    timeline: Path | None = None
    profile: Path | None = None

    def of_session(self, number: int) -> FolderOptions:
        """The folders of one of a process's sessions: these of the first, and `session-2` in them of the
        second.

        Args:
            number: of the session, from 0.
        """
        if number == 0:
            return self
        own = f"session-{number + 1}"
        return FolderOptions(self.timeline and self.timeline / own, self.profile and self.profile / own)


class AttachOptions(msgspec.Struct, frozen=True):
    """All options of `attach` but the model, its optimizers and the process group."""

    policy: str | Policy | Plan = AUTO
    carrier: CarrierOptions = CarrierOptions()
    measuring: MeasuringOptions = MeasuringOptions()
    adapting: AdaptingOptions = AdaptingOptions()
    stepping: SteppingOptions = SteppingOptions()
    folders: FolderOptions = FolderOptions()
    progress_s: float | None = None

    def __post_init__(self) -> None:
        given = self.policy
        if isinstance(given, type):
            raise InputError(f"policy: got the class {given.__name__}, expected an object of it: {given.__name__}()")
        need(isinstance(given, (str, Plan, Policy)), "policy", given, "a name, a policy or a plan")
        if self.backend == "server":
            order = self.stepping.order
            need(order == "planned", "order", order, "'planned' with backend='server', which needs no order")
            algorithm = self.carrier.algorithm
            need(algorithm is None, "algorithm", algorithm, "none with backend='server': it is of all-reduce")
        asked = (self.adapting.tune, self.adapting.knobs)
        need(self.policy != AUTO or not self.adapting.given, "tune, knobs", asked, "neither with auto")
        if isinstance(self.policy, Plan):
            need(not self.adapting.given, "tune, knobs", asked, "neither with a plan, which has no knobs: give a policy")

    @staticmethod
    def of(policy: str | Policy | Plan | None, keywords: Mapping[str, Any], launched: LaunchOptions) -> AttachOptions:
        """Merge a script's options with its launcher's, which take precedence.

        Args:
            policy: the script's; None for the default, which depends on the other options.
            keywords: the script's, see `AttachKeywords`.
            launched: the launcher's.

        Raises:
            TypeError: `attach` has no such keyword.
            InputError: an option has a wrong value, or two options exclude each other. Where the
                launcher's are at fault, it names their variable.
            FormatError: what a file that the launcher names contains cannot be read.
        """
        try:
            return AttachOptions._merged(policy, keywords, launched)
        except FormatError:
            raise
        except (InputError, OSError) as error:
            AttachOptions._merged(policy, keywords, LaunchOptions())  # raises what the script alone has wrong
            raise InputError(f"{LAUNCH_VARIABLE}: {error}") from None

    @staticmethod
    def _merged(policy: str | Policy | Plan | None, keywords: Mapping[str, Any], launched: LaunchOptions) -> AttachOptions:
        unknown = sorted(set(keywords) - set(AttachKeywords.__annotations__))
        if unknown:
            raise TypeError(f"attach() got an unexpected keyword argument {unknown[0]!r}")
        given = {**keywords, **_keywords(launched)}
        tune, verify, knobs = given.get("tune"), given.get("verify"), given.get("knobs")
        wire_dtype = None if given.get("wire_dtype") is None else wire_dtype_of(given["wire_dtype"])
        carrier = _struct(
            CarrierOptions, given, servers_store=launched.servers_store, wire_dtype=wire_dtype, shared_memory=is_wanted()
        )
        is_path = knobs is None or isinstance(knobs, (str, os.PathLike))
        need(is_path, "knobs", knobs, "the path of a file of tuned knobs (a policy's own are its arguments)")
        adapting = AdaptingOptions((TuneOptions() if tune is True else tune) or None, None if knobs is None else Path(knobs))
        policy = _chosen(launched) or policy
        if policy is None:
            policy = policies.default(carrier.backend or "all-reduce") if adapting.given else AUTO
        return AttachOptions(
            policy,
            carrier,
            _struct(MeasuringOptions, given),
            adapting,
            _struct(SteppingOptions, given, verify=(VerifyOptions() if verify is True else verify) or None),
            FolderOptions(_path(launched.timeline), _path(launched.profile)),
            launched.progress,
        )

    @property
    def asks_for_nothing(self) -> bool:
        """Whether one rank has nothing to do: no plan to carry out and nothing to measure or check."""
        checks = self.stepping.verify is not None or self.stepping.check_finite
        return self.may_choose_backend and self.folders == FolderOptions() and not checks

    @property
    def is_auto(self) -> bool:
        """Whether the session searches for its policy."""
        return isinstance(self.policy, str) and self.policy == AUTO

    @property
    def backend(self) -> BackendName:
        """What carries messages unless the session chooses between backends: what is named. If
        nothing is, what the plan names; servers for a policy or plan that only they can carry; else
        all-reduce.
        """
        if self.carrier.backend is not None:
            return self.carrier.backend
        if isinstance(self.policy, Plan):
            only_servers = why_not(self.policy, "all-reduce") is not None and why_not(self.policy, "server") is None
        else:
            name = catalog.parse(self.policy).name if isinstance(self.policy, str) else self.policy.name
            only_servers = name in catalog.names("server") and name not in catalog.names("all-reduce")
        return "server" if only_servers else "all-reduce"

    @property
    def may_choose_backend(self) -> bool:
        """Whether the session may choose between backends: `auto` looks for the policy, no backend is
        named and nothing says what only one of them has.
        """
        unasked = self.carrier.backend is None and self.carrier.algorithm is None and self.measuring.network is None
        return self.is_auto and unasked and self.stepping.order == "planned"

    @property
    def algorithm(self) -> Algorithm | None:
        """Of all-reduce: the one that is named, or that a given network is of; None to choose by measuring."""
        network = self.measuring.network
        if self.carrier.algorithm is not None or network is None:
            return self.carrier.algorithm
        return "flat" if network.bus is UNSET else "hierarchical"

    def node_options(self, rank: int, ranks: Sequence[int], fingerprint: bytes) -> NodeOptions:
        """How the node of this rank sends.

        Args:
            rank: of this process in its group.
            ranks: of the group, as the whole job numbers them.
            fingerprint: 32 bytes, a digest of what the ranks have agreed on.
        """
        external = self.carrier.servers
        return NodeOptions(
            world=len(ranks),
            servers=external or len(ranks),
            rank=rank,
            server=None if external else rank,
            tell_tables=external > 0,
            fingerprint=fingerprint,
            packet_bytes=self.carrier.packet_bytes or NodeOptions.packet_bytes,
            rank_order=self.carrier.summation_order == "rank",
            dead_s=self.stepping.stall_timeout,
            ranks=tuple(ranks),
        )

    def terms(self) -> dict[str, Any]:
        """Options that must be equal on all ranks, beside policy, backend, order and barrier.

        Of files and measurements it only says whether they were given: rank 0's are the ones that
        are used.
        """
        return {
            "broadcast_buffers": self.stepping.broadcast_buffers,
            "profile_iterations": self.measuring.profile_iterations,
            "network": self.measuring.network is not None,
            "profile": self.measuring.profile is not None,
            "algorithm": self.algorithm,
            "packet_bytes": self.carrier.packet_bytes,
            "summation_order": self.carrier.summation_order,
            "servers": self.carrier.servers,
            "weight": self.carrier.weight,
            "wire_dtype": self.carrier.wire_dtype,
            "shared_memory": self.carrier.shared_memory,
            "tune": repr(self.adapting.tune),
            "knobs": self.adapting.knobs is not None,
            "verify": repr(self.stepping.verify),
            "check_finite": self.stepping.check_finite,
        }


def _chosen(launched: LaunchOptions) -> str | Policy | Plan | None:
    """The launcher's policy or plan, if any. Raises `InputError`, and `FormatError` for a file that
    cannot be read.
    """
    if launched.plan is not None:
        return files.read(launched.plan, Plan)
    if launched.policy == AUTO or (launched.policy is None and not launched.policy_knobs):
        return launched.policy
    return catalog.get(launched.policy or policies.default(launched.backend or "all-reduce"), **launched.policy_knobs)


def _keywords(launched: LaunchOptions) -> dict[str, Any]:
    """The launcher's options as keywords of `attach`."""
    given = {name: getattr(launched, name) for name in AttachKeywords.__annotations__ if hasattr(launched, name)}
    given["network"] = None if launched.network is None else files.read(launched.network, Network)
    del given["profile"]  # the launcher's `profile` is a folder to write to, not a profile
    return {name: value for name, value in given.items() if value is not None and value is not False}


def _struct(kind: Any, given: Mapping[str, Any], **fields: Any) -> Any:
    """Make a struct of `kind` from `fields` and those items of `given` that are fields of it."""
    return kind(**{**{name: value for name, value in given.items() if name in kind.__struct_fields__}, **fields})


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
