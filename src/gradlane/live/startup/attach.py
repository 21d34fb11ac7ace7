"""attach: resolves the options, makes the ranks agree on them, connects them, and builds the
Session.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from msgspec import UNSET

from gradlane import policies
from gradlane.core import files
from gradlane.core.backends import BackendName, refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy, replans
from gradlane.core.profile import Layer, Profile, TensorProfile
from gradlane.core.records.search_log import ANY, AUTO
from gradlane.core.records.tuned import Tuned
from gradlane.errors import CapacityError, JobError, UnsupportedError
from gradlane.live.adapt.auto import Auto
from gradlane.live.adapt.controller import PlanController
from gradlane.live.adapt.profiling import Planner, check_fits
from gradlane.live.adapt.replanning import Replanning
from gradlane.live.adapt.tuner import digest, prepare
from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.base import Backend
from gradlane.live.backends.carriers import CONNECT_S, with_servers
from gradlane.live.backends.copies import copy_from, wait_for_all
from gradlane.live.backends.external_servers import connections
from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.backends.process_groups import NewGroups, is_gloo
from gradlane.live.backends.streams import streams_of
from gradlane.live.comm.coordination import Coordination
from gradlane.live.session.buffer_places import BufferPlaces
from gradlane.live.session.console import ONCE, use_console
from gradlane.live.session.deferred_step import why_it_needs_the_barrier, why_not_copied
from gradlane.live.session.finite import need_finite
from gradlane.live.session.guarded_states import own_class
from gradlane.live.session.idle import IdleSession
from gradlane.live.session.ignored import ignored_in
from gradlane.live.session.job import Job
from gradlane.live.session.module_buffers import BufferSync
from gradlane.live.session.session import Session
from gradlane.live.session.step_observer import StepObserver
from gradlane.live.session.verification import Verifier
from gradlane.live.startup import handshake
from gradlane.live.startup.launched import begin_attach, launched, note_attached
from gradlane.live.startup.lifecycle import forget, keep
from gradlane.live.startup.meeting import ending_together, meet
from gradlane.live.startup.networks import measured_by
from gradlane.live.startup.options import AttachOptions, FolderOptions, SteppingOptions
from gradlane.live.startup.validation import Optimizers, job_of, trains_alone
from gradlane.planning import catalog
from gradlane.planning.measured import where
from gradlane.planning.plans import make_plan
from gradlane.planning.ranking import SAFE, policy_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradlane.live.startup.options import AttachKeywords

log = logging.getLogger("gradlane")

_attachments = itertools.count()
# iterations measured before there is a plan; at most 50 for policies that wait until the times at
# which gradients become ready repeat
_ITERATIONS, _UNTIL_STABLE = 3, 50
_SHORTAGE_S = 2.0  # in which all ranks hear that a host lacks memory
_UNMEASURED = Network.line(2, startup_ns=0, bytes_per_second=10**9)


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    policy: str | Policy | Plan | None = None,
    *,
    process_group: Any = None,
    **options: Unpack[AttachKeywords],
) -> Session | IdleSession:
    """Schedule the gradient communication of `model` from now on, in place of
    DistributedDataParallel.

    Call it on every rank after `init_process_group()`, with the model on its device and before any
    `compile()`. Parameters and buffers become rank 0's. The training loop stays as it is. Options
    that `gradlane launch` was given win over these. In a process that trains alone (no process
    group, or one rank and no policy, backend or measurement asked for) the session does nothing.

    Args:
        model: on one device per rank, neither wrapped in DistributedDataParallel nor later.
        optimizer: one or several that update `model`; None if the script updates the parameters
            itself.
        policy: a name from `gradlane policies`, perhaps with knobs as in "p3:slice_bytes=1MiB", a Policy, a Plan (from
            `gradlane plan`), or "auto" to search for the fastest policy while training (docs/auto.md). None
            is "auto", or with `tune` or `knobs` the policy `blocks` over all-reduce and `mercury`
            over servers.
        backend: "all-reduce" uses torch.distributed. "server" uses gradlane's own transport,
            through CPU memory; it needs no order planned ahead and also carries policies that
            choose each packet as it is sent. None lets "auto" choose between the two, for tensors
            in CPU memory and unless `network` or `order="coordinator"` is given. Otherwise None
            means all-reduce, or servers for a policy or plan that only they can carry.
        algorithm: all-reduce backend only. "flat" sums over all ranks at once, "hierarchical" within
            each host first, for hosts with equally many ranks, over Gloo on the CPU. None: where that
            can be done, both are measured and the faster one is used; with a `network`, the one that
            it is of.
        servers: server backend only. Number of servers in processes of their own (`gradlane launch
            --servers`, `gradlane server`); 0 for one in each rank's process.
        packet_bytes: server backend only. A multiple of 64 up to 512 KiB; None for 30 KiB.
        summation_order: server backend only. "arrival" (None) adds each packet when it arrives;
            "rank" adds in rank order, which gives the same bits in every run and under every
            policy, and takes more memory.
        network: to plan for. None to measure it; sessions of the same ranks and options within ten minutes go on with what
            the first has measured.
        profile: to plan from; None to measure it over the first iterations.
        profile_iterations: iterations measured before the policy's plan takes over; until then
            gradients travel in DDP's buckets and every update is awaited before the next forward
            pass. None for 3, and with "prophet" for as many as it takes until gradients become
            ready at the same times again and again, at most 50.
        order: "planned" fixes the order of messages ahead; with "coordinator" rank 0 decides it as
            gradients become ready, for jobs in which that order varies (ByteScheduler, section 5).
        cross_barrier: whether the next forward pass may begin before all updates are done. None
            lets the plan decide if the optimizer permits it; False never; True also for an
            optimizer that gradlane does not know. That each update of such a one depends on the parameter's own
            gradient alone is verified in the first three iterations that cross the barrier.
        broadcast_buffers: keep buffers equal to rank 0's at each forward pass, as DDP does. They
            are sent during the backward pass before it, or at the start of the forward pass if rank
            0's script has changed them since. "forward" always sends them there: for scripts that
            change their dtype or shape, or change them in each step, but not from the first ones on.
        timeout: seconds after which waiting for another rank is an error, though every rank answers. None for the
            timeout of the process group, as DDP has it (30 minutes over Gloo unless `init_process_group` says
            otherwise). Once a minute one line says who is waited for.
        stall_timeout: seconds, 1 to 86400, after which a rank that says nothing (its process is
            stopped, its host is cut off) is an error. A rank whose Python is busy still speaks, and
            is waited for, for up to `timeout`.
        weight: TCP connections per lane and peer, 1 to 8. TCP shares a contended link evenly
            between connections, so that a job of weight 2 gets up to twice the share of a job of
            weight 1 (docs/sharing.md).
        wire_dtype: torch.bfloat16 or torch.float16, or their names: float32 gradients travel so, in
            half of the bytes, and are summed with its precision; other gradients travel as they
            are. None for float32 (docs/half-precision.md).
        tune: try other values of the policy's knobs while training and keep the best
            (ByteScheduler, section 4.3); `TuneOptions` says how and for how long. Only the time of
            a step depends on it, no result does.
        knobs: a file of tuned knobs on rank 0's host. With `tune` the search begins with that file,
            if there is one, and writes its result there; without, the file's knobs are used.
        verify: compare the first steps, and some later ones, with what DDP would have done;
            `VerifyOptions` says which. Comparing a step costs a copy of parameters, optimizer state
            and gradients, and an all-reduce. A difference raises `VerificationError`.
        check_finite: raise `NotFiniteError` on all ranks, before the update, if a gradient is infinite
            or NaN; it names the rank and the tensor. Steps that a GradScaler leaves out raise nothing.
            Not over NCCL.
        keep_log: keep the Dispatcher's inputs and answers of the last iterations, for
            `Session.dispatch_log()`.
        process_group: the ranks that train `model` together, this one among them; None for the default
            group. Groups of some ranks may attach at the same time, and one process to several.

    Returns:
        The running session.

    Raises:
        UnsupportedError: the model, an optimizer or a combination of options cannot be used.
        InputError: an argument has a wrong value.
        PlanError: the backend cannot carry the plan, or the plan is of another model.
        MismatchError: ranks disagree, or a rank did not call `attach` in time.
        CommunicationError: ranks or servers cannot be reached. All before any gradient is sent, on
            every rank that the failing rank can still reach.
    """
    return attach_from(model, optimizer, policy, process_group, options)


@dataclass(frozen=True)
class Wrapped:
    """How torch's DistributedDataParallel leaves a model: equal on all ranks, but for its buffers.

    Args:
        buffers_are_due: the next forward pass begins with rank 0's buffers; the same on all ranks.
        ignored: names of the parameters and buffers that torch's class was told to ignore when it wrapped the model.
        finds_unused: it was told to find unused parameters.
    """

    buffers_are_due: bool
    ignored: frozenset[str]
    finds_unused: bool


def attach_from(
    model: torch.nn.Module,
    optimizer: Optimizers,
    policy: str | Policy | Plan | None,
    process_group: Any,
    options: Mapping[str, Any],
    wrapped: Wrapped | None = None,
) -> Session | IdleSession:
    """As `attach`, for a model that torch's DistributedDataParallel may have trained before.

    Args:
        model, optimizer, policy, process_group: as for `attach`.
        options: the keywords of `attach`.
        wrapped: how torch's class leaves the model; None if it was not wrapped.

    Returns:
        As `attach`, and raises as it does.
    """
    begin_attach()
    use_console()
    resolved = AttachOptions.of(policy, options, launched())
    alone = trains_alone()
    ignored = ignored_in(model) if wrapped is None else wrapped.ignored
    job = job_of(model, optimizer, process_group, resolved.stepping.timeout, resolved.carrier.wire_dtype, ignored)
    if wrapped is not None:
        job = replace(job, finds_unused=wrapped.finds_unused, wrapped=True)
    if alone or (job.world == 1 and resolved.asks_for_nothing):
        note_attached()
        return IdleSession(model)
    start = _start_of(job, resolved)
    may_cross = _may_cross(job, resolved.stepping.cross_barrier)
    terms = _terms(job, resolved, start, may_cross)
    roll, coordination = meet(job, resolved.stepping.stall_timeout)
    new_groups = NewGroups(job.group, roll.store, roll.name)
    await_others = coordination.failures.collective
    with ending_together(coordination) as opened:
        await_others(lambda: handshake.agree(terms, job, roll, start.fault), "the handshake")
        try:
            what = connections(resolved.carrier.servers)
            backend = await_others(lambda: _connect(job, resolved, new_groups, terms), what)
        except CapacityError:
            with suppress(JobError, RuntimeError):
                await_others(lambda: _hear_of_a_shortage(job, new_groups.store), "the connections")
            raise
        opened.append(backend)
        if wrapped is None:
            await_others(
                lambda: copy_from(0, job.synchronised, backend.control_group, backend.control_device), "rank 0's parameters"
            )
        if resolved.stepping.check_finite:
            need_finite(job.params, job.global_rank)
        buffers_are_due = wrapped is None or wrapped.buffers_are_due
        session = _build(job, resolved, start, may_cross, coordination, new_groups, backend, buffers_are_due)
        # a rank that closes its session at once would break connections that others still make
        await_others(lambda: wait_for_all(backend.control_group, backend.control_device), "the end of attach")
    keep(session)
    note_attached()
    number = next(_attachments)
    if resolved.progress_s is not None and job.rank == 0:
        session.print_progress(resolved.progress_s, f"session {number + 1}, {job.model_name}" if number else "")
    session.on_close(before=partial(_leave_files, resolved.folders.of_session(number), job.global_rank), after=forget)
    return session


# -- resolving: what the session starts with -----------------------------------------------------------------


@dataclass(frozen=True)
class _Start:
    """What a session starts with.

    Args:
        chosen: the policy or plan that was asked for; under `auto`, the safe one.
        first: `chosen` with the knobs from a file, if one was given.
        controller: changes the plan while the session trains; None to keep the first one. Under
            `auto` it is made later, when it is known what carries messages.
        iterations: measured before `first` is planned.
        until_stable: measure fewer once gradients become ready at the same times again and again.
        fault: why this rank cannot start, which the other ranks cannot know by themselves; "" if it
            can.
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
    backend = options.backend
    repeats = not isinstance(chosen, Plan) and replans(chosen)
    first: Policy | Plan = chosen
    controller: PlanController | None = None
    fault = ""
    if not isinstance(chosen, Plan) and options.adapting.given:
        about = Tuned(chosen.name, {}, job.model_name, digest(job.specs), job.world, backend)
        first, controller, fault = prepare(chosen, job.specs, about, job.rank, options.adapting.tune, options.adapting.knobs)
    if controller is None and not isinstance(chosen, Plan) and repeats and job.world > 1:
        controller = Replanning(job.rank, chosen, _sums_in_streams(job, backend), streams_of(job.device) is not None)
    given = options.measuring.profile_iterations
    until_stable = given is None and repeats
    return _Start(chosen, first, controller, given or (_UNTIL_STABLE if until_stable else _ITERATIONS), until_stable, fault)


def _refuse_what_does_not_fit(chosen: Policy | Plan, job: Job, options: AttachOptions) -> None:
    """Raise `PlanError` if the backend cannot carry `chosen`, or it is a plan of another model; raise
    `UnsupportedError` for an option that the model's device does not have.
    """
    backend, servers = options.backend, options.carrier.servers
    in_stream = _sums_in_streams(job, backend)
    if in_stream and options.stepping.check_finite:
        raise UnsupportedError(
            f"check_finite looks at gradients in CPU memory, and NCCL sums them on {job.device}, where a look would wait for "
            "the device; use torch.autograd.set_detect_anomaly, or backend='server'"
        )
    if in_stream and options.stepping.order == "coordinator":
        raise UnsupportedError(
            "order: got 'coordinator' for sums over NCCL, expected 'planned': a thread would start them, elsewhere among "
            "the script's own collectives on each rank, and ranks may then wait for each other for ever"
        )
    if in_stream and options.carrier.weight > 1:
        raise UnsupportedError(
            f"weight: got {options.carrier.weight} for sums over NCCL, expected 1: each connection would be a communicator "
            "of its own, and nothing fixes in which order ranks use them"
        )
    if isinstance(chosen, Plan):
        refuse_what_cannot_be_done(chosen, backend, servers > 0, in_stream)
        check_fits(chosen, job.specs)
    elif chosen.name in catalog.names() and (in_stream or chosen.name not in catalog.names(backend, external=servers > 0)):
        # raises, with the reason
        make_plan(chosen, _unmeasured_profile(job), Place(_UNMEASURED, backend, servers, in_stream=in_stream))


def _may_cross(job: Job, cross_barrier: bool | None) -> bool:
    if cross_barrier is not None:
        own = [each for each in job.optimizers if why_it_needs_the_barrier(each) is not None] if cross_barrier else []
        for optimizer in own:
            reason = why_not_copied(optimizer)
            if reason is not None:
                raise UnsupportedError(f"cross_barrier: got True, and {reason}: leave it out, which keeps the barrier")
        return cross_barrier
    for optimizer in job.optimizers:
        reason = why_it_needs_the_barrier(optimizer)
        if reason is not None:
            if job.rank == 0:
                log.warning("gradlane: the barrier is kept: %s", reason, extra=ONCE)
            return False
    return bool(job.optimizers)


# -- agreeing -------------------------------------------------------------------------------------------------


def _terms(job: Job, options: AttachOptions, start: _Start, may_cross: bool) -> handshake.Terms:
    chosen = start.chosen
    policy = AUTO if options.is_auto else f"plan {chosen.fingerprint}" if isinstance(chosen, Plan) else repr(chosen)
    backend = ANY if _may_choose_backend(job, options) else options.backend
    return handshake.terms_of(job, policy, backend, options.stepping.order, {"cross_barrier": may_cross, **options.terms()})


# -- connecting -----------------------------------------------------------------------------------------------


def _connect(job: Job, options: AttachOptions, new_groups: NewGroups, terms: handshake.Terms) -> Backend:
    carrier = options.carrier

    def connect_servers(control: Any = None, connect_s: float | None = None) -> ParameterServerBackend:
        return ParameterServerBackend(
            new_groups,
            options.node_options(job.rank, job.ranks, terms.fingerprint()),
            job.timeout_s,
            servers_store=carrier.servers_store,
            weight=carrier.weight,
            control=control,
            connect_s=connect_s,
            dtype=job.measured_dtype,
            shared_memory=carrier.shared_memory,
        )

    if options.backend == "server":
        return connect_servers()
    # a network may have the bus of hosts that sum hierarchically by themselves, as those of NCCL do
    algorithm = options.algorithm if is_gloo(_group_of(job), job.device) else carrier.algorithm
    in_stream = _sums_in_streams(job, "all-reduce")
    device, streams = (job.device, streams_of(job.device)) if in_stream else (torch.device("cpu"), None)
    all_reduce = AllReduceBackend(device, streams, new_groups, job.timeout_s, carrier.weight, job.measured_dtype, algorithm)
    if not _may_choose_backend(job, options):
        return all_reduce
    connect = partial(connect_servers, all_reduce.control_group, min(CONNECT_S, job.timeout_s))
    return with_servers(all_reduce, connect, new_groups.store, job.rank, job.ranks, job.timeout_s)


def _hear_of_a_shortage(job: Job, store: Any) -> None:
    """Wait until every rank has the error of the host that lacks memory, so that none reports another rank's exit instead."""
    store.set(f"shortage/{job.rank}", "")
    store.wait([f"shortage/{rank}" for rank in range(job.world)], timedelta(seconds=_SHORTAGE_S))


def _may_choose_backend(job: Job, options: AttachOptions) -> bool:
    return options.may_choose_backend and job.world > 1 and not _sums_in_streams(job, "all-reduce")


def _group_of(job: Job) -> Any:
    return dist.group.WORLD if job.group is None else job.group


def _sums_in_streams(job: Job, backend: BackendName) -> bool:
    """Whether sums take their turn in the streams of the model's device. Otherwise they are made in CPU memory."""
    streams = streams_of(job.device)
    return streams is not None and backend == "all-reduce" and streams.orders(_group_of(job))


# -- building -------------------------------------------------------------------------------------------------


def _build(
    job: Job,
    options: AttachOptions,
    start: _Start,
    may_cross: bool,
    coordination: Coordination,
    new_groups: NewGroups,
    backend: Backend,
    buffers_are_due: bool,
) -> Session:
    """Measure the network where none is given, and start the session."""
    given, stepping = options.measuring.profile, options.stepping
    profile = None if given is None else given.with_wire_dtype(job.wire_dtype)
    await_others = coordination.failures.collective
    places = await_others(lambda: _places(job, options, backend), "the measuring of the network")
    controller = start.controller
    if options.is_auto and job.world > 1:
        controller = Auto(job.rank, job.model_name, places, backend.has_streams, streams_of(job.device) is not None)
    return Session(
        job,
        backend,
        streams_of(job.device),
        planner=Planner(start.first, places, profile, job.specs, start.iterations, start.until_stable, job.wire_dtype),
        controller=controller,
        first_plan=make_plan(policies.get("ddp"), _unmeasured_profile(job), Place(_UNMEASURED)),
        may_cross=may_cross,
        coordination=coordination,
        buffers=await_others(
            lambda: _buffer_sync(job, new_groups, stepping.broadcast_buffers, buffers_are_due), "the connections for buffers"
        ),
        verifier=await_others(lambda: _verifier(job, new_groups, stepping, buffers_are_due), "the connections of verification"),
        checks_finite=stepping.check_finite,
        keeps_log=stepping.keep_log,
    )


def _places(job: Job, options: AttachOptions, backend: Backend) -> tuple[Place, ...]:
    """Where plans can be carried out; the networks are measured unless one is given (collective)."""
    networks: Mapping[BackendName, Network]
    if options.measuring.network is not None:
        networks = {options.backend: options.measuring.network}
    else:
        over = dist.get_backend_config(_group_of(job)), type(backend), backend.control_device, backend.has_streams
        connected = (tuple(job.ranks), *over, job.device, job.measured_dtype, options.backend, options.carrier)
        networks = measured_by(backend, job.rank, connected).networks
    coordinated = options.stepping.order == "coordinator"
    return tuple(
        Place(network, name, options.carrier.servers, coordinated, backend.has_streams) for name, network in networks.items()
    )


def _buffer_sync(job: Job, new_groups: NewGroups, broadcast_buffers: bool | str, are_due: bool) -> BufferSync | None:
    if not broadcast_buffers or not job.buffers:
        return None
    places, at_start = BufferPlaces(job.model, job.ignored), broadcast_buffers == "forward"
    return BufferSync(places, new_groups, job.rank, job.timeout_s, at_start, are_due=are_due)


def _verifier(job: Job, new_groups: NewGroups, stepping: SteppingOptions, buffers_are_due: bool) -> StepObserver:
    unknown = [own_class(each) for each in job.optimizers if stepping.cross_barrier and why_it_needs_the_barrier(each)]
    if stepping.verify is None and not unknown:
        return StepObserver()
    return Verifier(stepping.verify, job, new_groups, unknown, buffers_are_due)


def _unmeasured_profile(job: Job) -> Profile:
    tensors = tuple(TensorProfile(spec, 0, 0) for spec in job.specs)
    return Profile(
        job.model_name, str(job.device), tensors, (Layer("all", 0),), 0, "unmeasured", wire_dtype=job.wire_dtype or UNSET
    )


# -- ending ---------------------------------------------------------------------------------------------------


def _leave_files(folders: FolderOptions, rank: int, session: Session) -> None:
    if folders.timeline is not None:
        files.leave(folders.timeline / f"timeline-rank{rank}.json", session.timeline())
        files.leave(folders.timeline / f"plan-rank{rank}.json", session.plan)
    if rank != 0 or not session.has_profile:  # a short job, or one that was given a plan, has measured none
        return
    places = session.places
    if folders.timeline is not None:
        _leave_measured(folders.timeline, session.profile(), places[0])
    if folders.profile is not None:  # to plan with, whatever carries messages at the end of this job
        all_reduce = (place for place in places if place.backend == "all-reduce")
        _leave_measured(folders.profile, session.profile(), next(all_reduce, places[0]))


def _leave_measured(folder: Path, profile: Profile, place: Place) -> None:
    files.leave(folder / "profile.json", profile)
    files.leave(folder / "network.json", where(place))
