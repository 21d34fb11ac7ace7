"""attach: from a model, an optimizer and a policy to a running Session, or to a clear refusal."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import gradlane
from gradlane import policies
from gradlane.core import files
from gradlane.core.backends import BACKENDS, BackendName, refuse_what_cannot_be_done
from gradlane.core.fields import need, need_int
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy, replans
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.search_log import AUTO, SearchLog
from gradlane.core.tuned import Tuned
from gradlane.errors import InputError, JobError, UnsupportedError
from gradlane.live.adapt.auto import Auto
from gradlane.live.adapt.controller import PlanController
from gradlane.live.adapt.profiling import Planner, check_fits
from gradlane.live.adapt.reassembly import Reassembly
from gradlane.live.adapt.tuner import digest, prepare
from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.base import Backend
from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.backends.streams import streams_of
from gradlane.live.comm.control_channel import ControlChannel
from gradlane.live.session.deferred_step import why_it_needs_the_barrier
from gradlane.live.session.module_buffers import BufferSync, places_of_buffers
from gradlane.live.session.session import Session
from gradlane.live.session.verification import Verifier, VerifyOptions
from gradlane.live.startup import handshake
from gradlane.live.startup.lifecycle import forget, keep
from gradlane.live.startup.overrides import SummationOrder, overrides
from gradlane.live.startup.validation import Optimizers, as_list, copy_from_rank_0, trained_parameters
from gradlane.planning import catalog
from gradlane.planning.plans import make_plan
from gradlane.planning.ranking import SAFE, policy_of
from gradlane.planning.tuning import TuneOptions
from gradlane.transport import NodeOptions

log = logging.getLogger("gradlane")

_attachments = itertools.count()
_ITERATIONS, _UNTIL_STABLE = 3, 50  # measured before there is a plan; the second: at most, until gradients' times repeat
_UNMEASURED = Network.line(2, startup_ns=0, bytes_per_second=10**9)


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    policy: str | Policy | Plan | None = None,
    *,
    backend: BackendName = "all-reduce",
    packet_bytes: int | None = None,
    summation_order: SummationOrder | None = None,
    servers: int = 0,
    network: Network | None = None,
    profile: Profile | None = None,
    profile_iterations: int | None = None,
    order: Literal["planned", "coordinator"] = "planned",
    cross_barrier: bool | None = None,
    broadcast_buffers: bool | Literal["forward"] = True,
    process_group: Any = None,
    timeout: float = 60.0,
    weight: int = 1,
    tune: bool | TuneOptions = False,
    knobs: str | Path | None = None,
    verify: bool | VerifyOptions = False,
) -> Session:
    """Schedule the gradient communication of `model` from now on, in place of DistributedDataParallel.

    Call it on every rank after `init_process_group()`, with the model on its device and before any
    `compile()`. Parameters and buffers become rank 0's. The training loop stays as it is.

    policy: "auto" or None to have the best found while training (docs/auto.md), a name of `gradlane policies`, a Policy
        with its knobs, or a Plan (from `gradlane plan`). With `tune` or `knobs` None is `blocks` over all-reduce, `mercury`
        over servers.
    backend: what carries the messages. "all-reduce" is torch.distributed's; "server" is gradlane's own transport, through
        CPU memory: it tells packets apart by what they are of, so that no order is planned ahead, and carries
        the policies that choose each packet as it is sent or mark lanes.
    servers: of the server backend, how many there are in processes of their own (`gradlane launch --servers`,
        `gradlane server`); 0 for one in each rank's process.
    packet_bytes: of the server backend, a multiple of 64 up to 512 KiB; 30 KiB where not given.
    summation_order: of the server backend. "arrival" (None) adds each packet when it comes; "rank" adds in the order
        of ranks, which gives the same bits in every run, under every policy, and holds more memory.
    network, profile: what to plan from; measured over the first moments and iterations where not given.
    profile_iterations: iterations measured before the policy's plan takes over; until then gradients
        travel in DDP's buckets, behind the barrier. None: 3; for "prophet" as many as it takes until gradients become ready
        at the same times again and again, 50 at most.
    order: "planned" fixes the order of messages ahead; with "coordinator" rank 0 decides it as it goes,
        for jobs in which the order of readiness varies (ByteScheduler §5).
    cross_barrier: None lets the plan decide where the optimizer permits it; False waits for all updates
        before the next forward pass; True vouches for an optimizer that gradlane does not know.
    broadcast_buffers: keep buffers equal to rank 0's at each forward pass, as DDP does; they travel during the backward pass
        before it, unless rank 0's script changes them between steps. "forward": always at the start of the forward pass,
        for scripts that do so on rank 0 alone and not from the first steps on.
    timeout: seconds after which a sum that does not end is an error.
    weight: connections where there would be one, 1 to 8. Where several jobs meet, TCP shares a link evenly between
        connections, so that a job of weight 2 gets up to twice as much as one of weight 1 (docs/sharing.md).
    tune: try other values of the policy's knobs while training, from its first plan on (ByteScheduler §4.3), and keep the
        best; `TuneOptions` says how long and how. No result depends on it but the time.
    knobs: a file of tuned knobs. With `tune`, what is found is left there, and a file that is there already is where it
        begins; without, the file's knobs are used. Read and written on rank 0's host.

    verify: compare the first steps, and some later ones, with what DDP would have done, and raise VerificationError where they
        differ; `VerifyOptions` says which. Costs a copy of parameters, state and gradients, and an all-reduce, in those.

    Returns the Session. Raises UnsupportedError, InputError, PlanError, MismatchError (ranks disagree) or
    CommunicationError, on every rank that the others' state can reach, before any gradient is sent.
    """
    if not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: call torch.distributed.init_process_group() before attach")
    overridden = overrides()
    policy = overridden.policy or policy
    backend = overridden.backend or backend
    packet_bytes = overridden.packet_bytes or packet_bytes
    summation_order = overridden.summation_order or summation_order
    servers = overridden.servers or servers
    network = overridden.network or network
    timeout = overridden.timeout or timeout
    weight = overridden.weight or weight
    tune = overridden.tune or (TuneOptions() if tune is True else tune)
    knobs = overridden.knobs or knobs
    verify = overridden.verify or (VerifyOptions() if verify is True else verify)
    need(profile_iterations is None or profile_iterations >= 1, "profile_iterations", profile_iterations, "1 or more")
    need(timeout > 0, "timeout", timeout, "seconds, more than 0")
    need_int("weight", weight, 1, 8)
    need(order in ("planned", "coordinator"), "order", order, "'planned' or 'coordinator'")
    need(broadcast_buffers in (True, False, "forward"), "broadcast_buffers", broadcast_buffers, "True, False or 'forward'")
    check_backend(backend, packet_bytes, summation_order, servers, order)
    optimizers = as_list(optimizer)
    params = trained_parameters(model)
    specs = tuple(_spec(name, param) for name, param in params)
    guess = _unmeasured_profile(type(model).__name__, str(params[0][1].device), specs)
    if policy is None:
        policy = policies.default(backend) if tune or knobs is not None else AUTO
    is_auto = policy == AUTO
    need(not is_auto or (not tune and knobs is None), "tune, knobs", (tune, knobs), "neither with auto")
    chosen = policy_of(SAFE) if is_auto else catalog.get(policy) if isinstance(policy, str) else policy
    if isinstance(chosen, Plan):
        need(not tune and knobs is None, "tune, knobs", (tune, knobs), "neither with a plan, which has no knobs: give a policy")
        refuse_what_cannot_be_done(chosen, backend, external=servers > 0)
        check_fits(chosen, specs)
    elif chosen.name in catalog.names() and chosen.name not in catalog.names(backend, external=servers > 0):
        make_plan(chosen, guess, Place(_UNMEASURED, backend, servers))  # refused with the reason, whatever is measured
    may_cross = _may_cross(optimizers, cross_barrier)
    world, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if world != dist.get_world_size():
        # a lane needs a group of its own, and torch.distributed names the groups of some ranks ambiguously
        has = "does not have this rank" if rank < 0 else f"has {world} of the {dist.get_world_size()} ranks"
        raise UnsupportedError(f"process_group {has}, expected one of all ranks")
    start: Policy | Plan = chosen
    turns: PlanController | None = None
    fault = ""
    if not isinstance(chosen, Plan) and (tune or knobs is not None):
        about = Tuned(chosen.name, {}, type(model).__name__, digest(specs), world, backend)
        start, turns, fault = prepare(chosen, specs, about, rank, tune or None, None if knobs is None else Path(knobs))
    device = params[0][1].device
    streams = streams_of(device)
    stream_ordered = streams is not None and backend == "all-reduce"
    until_stable = profile_iterations is None and not isinstance(chosen, Plan) and replans(chosen)
    iterations = profile_iterations or (_UNTIL_STABLE if until_stable else _ITERATIONS)
    if turns is None and not isinstance(chosen, Plan) and replans(chosen) and world > 1:
        turns = Reassembly(rank, chosen, stream_ordered)
    if is_auto and world > 1:
        turns = Auto(rank, SearchLog(type(model).__name__, world, backend, SAFE), backend, servers, stream_ordered)
    terms = handshake.Terms(
        gradlane=gradlane.__version__,
        torch=str(torch.__version__),
        world_size=world,
        policy=AUTO if is_auto else f"plan {chosen.fingerprint}" if isinstance(chosen, Plan) else repr(chosen),
        backend=backend,
        order=order,
        optimizers=tuple(type(one).__name__ for one in optimizers),
        options={
            "cross_barrier": may_cross,
            "broadcast_buffers": broadcast_buffers,
            "profile_iterations": profile_iterations,
            "network": network is not None,
            "profile": profile is not None,
            "packet_bytes": packet_bytes,
            "summation_order": summation_order,
            "servers": servers,
            "weight": weight,
            "tune": repr(tune or None),
            "knobs": knobs is not None,
            "verify": repr(verify or None),
        },
        tensors=tuple((name, str(param.dtype), tuple(param.shape)) for name, param in params),
        buffers=tuple((name, str(buffer.dtype), tuple(buffer.shape)) for name, buffer in model.named_buffers()),
    )
    store = handshake.agree(terms, process_group, str(next(_attachments)), timeout, fault)
    carrier: Backend
    if backend == "all-reduce":
        carrier = AllReduceBackend(device, streams, process_group, timeout, weight)
    else:
        carrier = ParameterServerBackend(
            streams,
            process_group,
            store,
            timeout,
            fingerprint=terms.fingerprint(),
            packet_bytes=packet_bytes or NodeOptions.packet_bytes,
            rank_order=summation_order == "rank",
            external=servers,
            servers_store=overridden.servers_store,
            weight=weight,
        )
    with _given_back_on_failure(carrier):
        buffers = list(model.buffers())
        filled = [tensor for tensor in (*model.parameters(), *buffers) if tensor.numel() > 0]
        copy_from_rank_0(filled, process_group)
        first_plan = make_plan(policies.get("ddp"), guess, Place(_UNMEASURED))
        if network is None:
            network = carrier.measure()
        place = Place(network, backend, servers, coordinated=order == "coordinator")
        session = Session(
            model,
            params,
            optimizers,
            planner=Planner(start, place, profile, specs, iterations, until_stable),
            turns=turns,
            first_plan=first_plan,
            coordinated=order == "coordinator",
            may_cross=may_cross,
            rank=rank,
            world=world,
            timeout_s=timeout,
            backend=carrier,
            peers=partial(ControlChannel, store, rank, world, timeout),
            buffers=_synchronised(model, process_group, rank, timeout, broadcast_buffers) if buffers else None,
            verifier=_verifier(verify, model, params, process_group, timeout) if verify else None,
        )
    keep(session)
    session.on_close(before=_leave_files, after=forget)
    return session


def _synchronised(
    model: torch.nn.Module, group: Any, rank: int, timeout: float, broadcast_buffers: bool | Literal["forward"]
) -> BufferSync | None:
    return (
        BufferSync(*places_of_buffers(model), group, rank, timeout, broadcast_buffers == "forward")
        if broadcast_buffers
        else None
    )


def _verifier(
    options: VerifyOptions, model: torch.nn.Module, params: Sequence[tuple[str, torch.nn.Parameter]], group: Any, timeout: float
) -> Verifier:
    names, tensors = [name for name, _ in params], [param for _, param in params]
    return Verifier(options, names, tensors, lambda: list(model.buffers()), group, timeout)


@contextmanager
def _given_back_on_failure(carrier: Backend) -> Iterator[None]:
    """The carrier's threads end with what went wrong, and so do the other ranks; left to the interpreter's end, a thread of
    the data plane would abort the process.
    """
    try:
        yield
    except BaseException as error:
        carrier.close(error if isinstance(error, JobError) else JobError(f"attach failed: {error!r}"))
        raise


# -- what is refused, and why ----------------------------------------------------------------------------


def check_backend(backend: str, packet_bytes: int | None, summation_order: str | None, servers: int, order: str) -> None:
    need(backend in BACKENDS, "backend", backend, "'all-reduce' or 'server'")
    if backend != "server":
        need(packet_bytes is None, "packet_bytes", packet_bytes, "none: packets are of backend='server'")
        need(summation_order is None, "summation_order", summation_order, "none: it is of backend='server'")
        need(servers == 0, "servers", servers, "none: they are of backend='server'")
        return
    need_int("servers", servers, 0, 65535)
    need(order == "planned", "order", order, "'planned' with backend='server', which needs no order")
    need(summation_order in (None, "arrival", "rank"), "summation_order", summation_order, "'arrival' or 'rank'")
    if packet_bytes is not None:
        need_int("packet_bytes", packet_bytes, 64, 512 << 10)
        need(packet_bytes % 64 == 0, "packet_bytes", packet_bytes, "a multiple of 64")


def _spec(name: str, param: torch.nn.Parameter) -> TensorSpec:
    return TensorSpec(name, param.numel() * param.element_size(), str(param.dtype).removeprefix("torch."))


def _may_cross(optimizers: Sequence[torch.optim.Optimizer], cross_barrier: bool | None) -> bool:
    if cross_barrier is not None:
        return cross_barrier
    if not optimizers:
        return False
    for optimizer in optimizers:
        reason = why_it_needs_the_barrier(optimizer)
        if reason is not None:
            if dist.get_rank() == 0:
                log.warning("gradlane: the barrier is kept: %s", reason)
            return False
    return True


# -- starting alike -----------------------------------------------------------------------------------------


def _unmeasured_profile(model: str, device: str, specs: Sequence[TensorSpec]) -> Profile:
    tensors = tuple(TensorProfile(spec, 0, 0) for spec in specs)
    return Profile(model, device, tensors, (Layer("all", 0),), 0, "unmeasured")


# -- ending -------------------------------------------------------------------------------------------------


def _leave_files(session: Session) -> None:
    overridden = overrides()
    if overridden.timeline is not None:
        overridden.timeline.mkdir(parents=True, exist_ok=True)
        files.write(overridden.timeline / f"timeline-rank{session.rank}.json", session.timeline())
        files.write(overridden.timeline / f"plan-rank{session.rank}.json", session.plan)
    if overridden.profile is not None and session.rank == 0:
        overridden.profile.mkdir(parents=True, exist_ok=True)
        files.write(overridden.profile / "profile.json", session.profile())
        files.write(overridden.profile / "network.json", session.network)
