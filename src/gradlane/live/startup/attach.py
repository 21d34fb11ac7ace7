"""attach: from a model, an optimizer and a policy to a running Session, or to a clear refusal."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import gradlane
from gradlane import policies
from gradlane.core import files
from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy, replans
from gradlane.core.profile import Layer, Profile, TensorProfile
from gradlane.core.search_log import AUTO, SearchLog
from gradlane.core.tuned import Tuned
from gradlane.errors import JobError
from gradlane.live.adapt.auto import Auto
from gradlane.live.adapt.controller import PlanController
from gradlane.live.adapt.profiling import Planner, check_fits
from gradlane.live.adapt.replanning import Replanning
from gradlane.live.adapt.tuner import digest, prepare
from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.base import Backend
from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.backends.streams import streams_of
from gradlane.live.comm.control_channel import ControlChannel
from gradlane.live.session.deferred_step import why_it_needs_the_barrier
from gradlane.live.session.job import Job
from gradlane.live.session.module_buffers import BufferSync, places_of_buffers
from gradlane.live.session.session import Session
from gradlane.live.session.verification import Verifier
from gradlane.live.startup import handshake
from gradlane.live.startup.lifecycle import forget, keep
from gradlane.live.startup.options import AttachOptions, FolderOptions, launched
from gradlane.live.startup.validation import Optimizers, copy_from_rank_0, job_of, require_process_group
from gradlane.planning import catalog
from gradlane.planning.plans import make_plan
from gradlane.planning.ranking import SAFE, policy_of
from gradlane.transport import NodeOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradlane.live.startup.options import AttachKeywords

log = logging.getLogger("gradlane")

_attachments = itertools.count()
_ITERATIONS, _UNTIL_STABLE = 3, 50  # measured before there is a plan; the second: at most, until gradients' times repeat
_UNMEASURED = Network.line(2, startup_ns=0, bytes_per_second=10**9)


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    policy: str | Policy | Plan | None = None,
    *,
    process_group: Any = None,
    **options: Unpack[AttachKeywords],
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
    keep_log: keep what the Dispatcher was told and answered in the last iterations, for `Session.dispatch_log()`.
    process_group: a group of all ranks; None for the default one.

    Returns the Session. Raises UnsupportedError, InputError, PlanError, MismatchError (ranks disagree) or
    CommunicationError, on every rank that the others' state can reach, before any gradient is sent.
    """
    require_process_group()
    resolved = AttachOptions.of(policy, options, launched())
    job = job_of(model, optimizer, process_group, resolved.stepping.timeout)
    start = _start_of(job, resolved)
    may_cross = _may_cross(job, resolved.stepping.cross_barrier)
    terms = _terms(job, resolved, start, may_cross)
    store = handshake.agree(terms, process_group, str(next(_attachments)), job.timeout_s, start.fault)
    backend = _connect(job, resolved, store, terms)
    with _given_back_on_failure(backend):
        session = _build(job, resolved, start, may_cross, store, backend)
    keep(session)
    session.on_close(before=partial(_leave_files, resolved.folders), after=forget)
    return session


# -- resolving: what the session begins with -----------------------------------------------------------------


@dataclass(frozen=True)
class _Start:
    """What a session begins with.

    Args:
        chosen: the policy or plan that was asked for; under `auto`, the safe one.
        first: the same with knobs from a file, where there is one.
        controller: what changes the plan while the session trains.
        iterations: how many are measured before `first` is planned.
        until_stable: measure until gradients become ready at the same times again and again, `iterations` at most.
        fault: why this rank cannot begin, where the others could not know it.
    """

    chosen: Policy | Plan
    first: Policy | Plan
    controller: PlanController | None
    iterations: int
    until_stable: bool
    fault: str = ""


def _start_of(job: Job, options: AttachOptions) -> _Start:
    policy = options.policy
    chosen = policy_of(SAFE) if options.is_auto else catalog.get(policy) if isinstance(policy, str) else policy
    _refuse_what_does_not_fit(chosen, job, options)
    backend, servers = options.carrier.backend, options.carrier.servers
    repeats = not isinstance(chosen, Plan) and replans(chosen)
    stream_ordered = streams_of(job.device) is not None and backend == "all-reduce"
    first: Policy | Plan = chosen
    controller: PlanController | None = None
    fault = ""
    if not isinstance(chosen, Plan) and options.adapting.given:
        about = Tuned(chosen.name, {}, job.model_name, digest(job.specs), job.world, backend)
        first, controller, fault = prepare(chosen, job.specs, about, job.rank, options.adapting.tune, options.adapting.knobs)
    if controller is None and not isinstance(chosen, Plan) and repeats and job.world > 1:
        controller = Replanning(job.rank, chosen, stream_ordered)
    if options.is_auto and job.world > 1:
        search_log = SearchLog(job.model_name, job.world, backend, SAFE)
        controller = Auto(job.rank, search_log, backend, servers, stream_ordered)
    given = options.measuring.profile_iterations
    until_stable = given is None and repeats
    return _Start(chosen, first, controller, given or (_UNTIL_STABLE if until_stable else _ITERATIONS), until_stable, fault)


def _refuse_what_does_not_fit(chosen: Policy | Plan, job: Job, options: AttachOptions) -> None:
    """Raise `PlanError` where the backend cannot carry what was chosen, or a plan is of another model."""
    backend, servers = options.carrier.backend, options.carrier.servers
    if isinstance(chosen, Plan):
        refuse_what_cannot_be_done(chosen, backend, external=servers > 0)
        check_fits(chosen, job.specs)
    elif chosen.name in catalog.names() and chosen.name not in catalog.names(backend, external=servers > 0):
        make_plan(chosen, _unmeasured_profile(job), Place(_UNMEASURED, backend, servers))  # refused with the reason


def _may_cross(job: Job, cross_barrier: bool | None) -> bool:
    if cross_barrier is not None:
        return cross_barrier
    for optimizer in job.optimizers:
        reason = why_it_needs_the_barrier(optimizer)
        if reason is not None:
            if job.rank == 0:
                log.warning("gradlane: the barrier is kept: %s", reason)
            return False
    return bool(job.optimizers)


# -- agreeing -------------------------------------------------------------------------------------------------


def _terms(job: Job, options: AttachOptions, start: _Start, may_cross: bool) -> handshake.Terms:
    chosen = start.chosen
    return handshake.Terms(
        gradlane=gradlane.__version__,
        torch=str(torch.__version__),
        world_size=job.world,
        policy=AUTO if options.is_auto else f"plan {chosen.fingerprint}" if isinstance(chosen, Plan) else repr(chosen),
        backend=options.carrier.backend,
        order=options.stepping.order,
        optimizers=tuple(type(one).__name__ for one in job.optimizers),
        options={"cross_barrier": may_cross, **options.terms()},
        tensors=job.described_tensors,
        buffers=job.described_buffers,
    )


# -- connecting -----------------------------------------------------------------------------------------------


def _connect(job: Job, options: AttachOptions, store: Any, terms: handshake.Terms) -> Backend:
    carrier, streams = options.carrier, streams_of(job.device)
    if carrier.backend == "all-reduce":
        return AllReduceBackend(job.device, streams, job.group, job.timeout_s, carrier.weight)
    return ParameterServerBackend(
        streams,
        job.group,
        store,
        job.timeout_s,
        fingerprint=terms.fingerprint(),
        packet_bytes=carrier.packet_bytes or NodeOptions.packet_bytes,
        rank_order=carrier.summation_order == "rank",
        external=carrier.servers,
        servers_store=carrier.servers_store,
        weight=carrier.weight,
    )


@contextmanager
def _given_back_on_failure(backend: Backend) -> Iterator[None]:
    """The backend's threads end with what went wrong, and so do the other ranks; left to the interpreter's end, a thread of
    the data plane would abort the process.
    """
    try:
        yield
    except BaseException as error:
        backend.close(error if isinstance(error, JobError) else JobError(f"attach failed: {error!r}"))
        raise


# -- building -------------------------------------------------------------------------------------------------


def _build(job: Job, options: AttachOptions, start: _Start, may_cross: bool, store: Any, backend: Backend) -> Session:
    """Copy rank 0's parameters to all ranks, measure the network where none is given, and start the session."""
    tensors = (*job.model.parameters(), *job.model.buffers())
    copy_from_rank_0([tensor for tensor in tensors if tensor.numel() > 0], job.group)
    profile, stepping = options.measuring.profile, options.stepping
    place = Place(
        options.measuring.network or backend.measure(),
        options.carrier.backend,
        options.carrier.servers,
        coordinated=stepping.order == "coordinator",
    )
    return Session(
        job,
        backend,
        planner=Planner(start.first, place, profile, job.specs, start.iterations, start.until_stable),
        controller=start.controller,
        first_plan=make_plan(policies.get("ddp"), _unmeasured_profile(job), Place(_UNMEASURED)),
        may_cross=may_cross,
        make_channel=partial(ControlChannel, store, job.rank, job.world, job.timeout_s),
        buffers=_buffer_sync(job, stepping.broadcast_buffers),
        verifier=None if stepping.verify is None else Verifier(stepping.verify, job),
        keeps_log=stepping.keep_log,
    )


def _buffer_sync(job: Job, broadcast_buffers: bool | str) -> BufferSync | None:
    if not broadcast_buffers or not any(True for _ in job.model.buffers()):
        return None
    return BufferSync(*places_of_buffers(job.model), job.group, job.rank, job.timeout_s, broadcast_buffers == "forward")


def _unmeasured_profile(job: Job) -> Profile:
    tensors = tuple(TensorProfile(spec, 0, 0) for spec in job.specs)
    return Profile(job.model_name, str(job.device), tensors, (Layer("all", 0),), 0, "unmeasured")


# -- ending ---------------------------------------------------------------------------------------------------


def _leave_files(folders: FolderOptions, session: Session) -> None:
    if folders.timeline is not None:
        folders.timeline.mkdir(parents=True, exist_ok=True)
        files.write(folders.timeline / f"timeline-rank{session.rank}.json", session.timeline())
        files.write(folders.timeline / f"plan-rank{session.rank}.json", session.plan)
    if folders.profile is not None and session.rank == 0:
        folders.profile.mkdir(parents=True, exist_ok=True)
        files.write(folders.profile / "profile.json", session.profile())
        files.write(folders.profile / "network.json", session.network)
