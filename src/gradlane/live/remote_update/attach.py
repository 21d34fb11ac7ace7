"""attach_to_servers: checks, agrees on and connects a job whose optimizer runs on parameter
servers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gradlane.core.backends import SummationOrder
from gradlane.core.fields import need, need_int
from gradlane.core.launch_options import STALL_TIMEOUT_S, LaunchOptions
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.errors import InputError, JobError, UnsupportedError
from gradlane.live.backends.copies import copy_from
from gradlane.live.backends.external_servers import connections, join_servers
from gradlane.live.backends.process_groups import NewGroups
from gradlane.live.remote_update.broadcasts import Broadcasts
from gradlane.live.remote_update.departures import Departures
from gradlane.live.remote_update.iterations import ServedIterations
from gradlane.live.remote_update.parameter_groups import ParameterGroups
from gradlane.live.remote_update.plans import sending_plan
from gradlane.live.remote_update.session import ServedSession
from gradlane.live.remote_update.states import place_states
from gradlane.live.remote_update.values import Values
from gradlane.live.session.console import use_console
from gradlane.live.session.ignored import ignored_in
from gradlane.live.session.job import Job
from gradlane.live.startup import handshake
from gradlane.live.startup.launched import begin_attach, launched, note_attached
from gradlane.live.startup.lifecycle import forget, keep
from gradlane.live.startup.meeting import ending_together, meet
from gradlane.live.startup.options import AttachOptions, CarrierOptions
from gradlane.live.startup.validation import Optimizers, job_of, require_process_group
from gradlane.transport import UNBOUNDED, Node


def attach_to_servers(
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    policy: str | Policy | None = None,
    staleness: int | None = 0,
    servers: int = 0,
    packet_bytes: int | None = None,
    summation_order: SummationOrder | None = None,
    broadcast_buffers: bool | None = None,
    process_group: Any = None,
    timeout: float | None = None,
    stall_timeout: float = STALL_TIMEOUT_S,
) -> ServedSession:
    """Train `model` with its parameters and the optimizer's state on servers, in CPU memory, over
    gradlane's transport.

    Call it on every rank after `init_process_group()`, in place of DistributedDataParallel.
    Parameters and buffers become rank 0's. The loop stays `zero_grad`, `backward`, `step`.
    Gradients are sent during the backward pass, and `step()` updates nothing on this rank. The next
    forward pass waits for each parameter at its first use.

    Args:
        model: with float32 parameters in CPU memory.
        optimizer: torch.optim.SGD, Adam or AdamW, one or several. Rank 0's state, if there is any,
            goes to the servers. Its options, such as the learning rate, may change between `step()`
            and the next backward pass.
        policy: a name, or a policy of your own, whose messages are parts of one parameter each: "mercury" (None),
            "mercury-no-preemption", "wfbp", "tictac", "p3" or "bytescheduler" (§6.1). Nothing is measured, so that it
            plans with sizes and the order of use alone. Servers update and return packet by packet under all of them.
        staleness: 0 trains in step: the gradients of all ranks are averaged for one update, as
            under DDP. With k > 0 a rank may be up to k iterations ahead of the slowest, with None
            any number. Each rank's gradient is then applied by itself when it arrives, with that
            rank's options: N ranks make N updates where DDP makes one.
        servers: number of servers in processes of their own (`gradlane launch --servers`); 0 for
            one in each rank's process.
        packet_bytes: a multiple of 64 up to 512 KiB; None for 30 KiB.
        summation_order: with staleness 0, as for `attach`: "rank" gives the same bits in every run.
        broadcast_buffers: keep buffers equal to rank 0's at each forward pass, as DDP does. None is
            True with staleness 0; otherwise each rank keeps its own buffers, and True is refused.
        process_group: the ranks that train `model`, this one among them; None for the default group.
        timeout: seconds after which waiting for a parameter is an error; more than the slowest rank
            needs for a step. None for the timeout of the process group.
        stall_timeout: seconds, 1 to 86400, after which a process that says nothing is an error.

    Returns:
        The running session.

    Raises:
        UnsupportedError: the model or the optimizer cannot be used.
        InputError: an argument, or an option of the launcher, has a wrong value.
        MismatchError: ranks disagree.
        CapacityError: a server does not have the memory.
        CommunicationError: ranks or servers cannot be reached. All before any gradient is sent.
    """
    begin_attach()
    require_process_group()
    options = AttachOptions.of(
        policy or "mercury", _keywords(packet_bytes, summation_order, servers, timeout, stall_timeout), _accepted(launched())
    )
    _check(staleness, options.carrier, broadcast_buffers)
    if ignored_in(model):
        raise UnsupportedError(
            f"DistributedDataParallel is told to ignore {min(ignored_in(model))}: servers hold one value of each parameter "
            "for all ranks; update on the workers (gradlane.attach)"
        )
    use_console()
    job = _float32_on_the_host(job_of(model, optimizer, process_group, options.stepping.timeout))
    groups = ParameterGroups(job.optimizers, job.params)
    plan = sending_plan(options.policy, job)
    terms = _terms(job, plan, options.carrier, groups, staleness, broadcast_buffers)
    params = [param for _, param in job.params]
    roll, coordination = meet(job, options.stepping.stall_timeout)
    await_others = coordination.failures.collective
    with ending_together(coordination) as opened:
        await_others(lambda: handshake.agree(terms, job, roll), "the handshake")
        tensors = (*model.parameters(), *model.buffers())
        await_others(lambda: copy_from(0, tensors, process_group, job.device), "rank 0's parameters")
        of_node = options.node_options(job.rank, job.ranks, terms.fingerprint())
        node = await_others(
            lambda: join_servers(roll.store, of_node, job.timeout_s, options.carrier.servers_store),
            connections(options.carrier.servers),
        )
        opened.append(_Closing(node))
        bound = UNBOUNDED if staleness is None else staleness
        departures = Departures(job, roll.store, staleness)
        values = Values(node, plan, params, _members(job, groups), groups.rules(), bound, job.timeout_s, departures)
        states = _states(job, groups)
        if any(states):
            place_states(states, params, values)
        synchronises = staleness == 0 and broadcast_buffers is not False and any(True for _ in model.buffers())
        buffers = None
        if synchronises:
            new_groups = NewGroups(job.group, roll.store, roll.name)
            buffers = await_others(lambda: Broadcasts(job, values, new_groups), "the connections for buffers")
        values.meet("every rank to attach")  # nobody waits for anybody's part in this any more
    coordination.channel.close()  # from here on the node tells what becomes of the others
    session = ServedSession(ServedIterations(job, groups, values, staleness, buffers), values, after_close=forget)
    keep(session)
    note_attached()
    return session


@dataclass(frozen=True)
class _Closing:
    """Closes a node, whatever the failure."""

    node: Node

    def close(self, failure: JobError | None) -> None:
        self.node.close()


def _check(staleness: int | None, carrier: CarrierOptions, broadcast_buffers: bool | None) -> None:
    """Raise `InputError` for options that do not go together."""
    if staleness is not None:
        need_int("staleness", staleness, 0, UNBOUNDED - 1)
    if staleness != 0:
        order = carrier.summation_order
        need(order is None, "summation_order", order, "none with staleness, where nothing is summed")
        need(not broadcast_buffers, "broadcast_buffers", broadcast_buffers, "False with staleness: ranks are not in step")


def _float32_on_the_host(job: Job) -> Job:
    """`job` with its parameters in registration order, about the order of use. Raises
    `UnsupportedError` for a parameter that servers cannot update.
    """
    for name, param in job.params:
        if param.dtype != torch.float32 or param.device.type != "cpu":
            raise UnsupportedError(
                f"{name} is of {param.dtype} on {param.device}: servers update float32 in CPU memory; update on the workers "
                "(gradlane.attach)"
            )
    return replace(job, params=job.params[::-1])


def _members(job: Job, groups: ParameterGroups) -> list[int]:
    """The parameter group of each parameter."""
    return [groups.of(param) for _, param in job.params]


def _states(job: Job, groups: ParameterGroups) -> list[dict[str, Any]]:
    """The optimizer's state of each parameter."""
    return [groups.states_of(param).get(param, {}) for _, param in job.params]


def _terms(
    job: Job,
    plan: Plan,
    carrier: CarrierOptions,
    groups: ParameterGroups,
    staleness: int | None,
    broadcast_buffers: bool | None,
) -> handshake.Terms:
    options = {
        "updates": "on the servers",
        "plan": plan.fingerprint,
        "staleness": staleness,
        "servers": carrier.servers,
        "packet_bytes": carrier.packet_bytes,
        "summation_order": carrier.summation_order,
        "broadcast_buffers": broadcast_buffers,
        "parameter groups": _members(job, groups),
        "rules": [rule.kind for rule in groups.rules()],
        "optimizer state": any(_states(job, groups)),
    }
    return handshake.terms_of(job, plan.policy, "server", "none", options)


def _keywords(
    packet_bytes: int | None, summation_order: SummationOrder | None, servers: int, timeout: float | None, stall_timeout: float
) -> dict[str, Any]:
    """The script's options as keywords of `gradlane.attach`."""
    carrier = {"backend": "server", "packet_bytes": packet_bytes, "summation_order": summation_order, "servers": servers}
    return {**carrier, "timeout": timeout, "stall_timeout": stall_timeout}


_PLANNED_FROM_SIZES = "policies plan from sizes alone, once"
_NOTHING_RECORDED = "nothing is recorded"
_NO_SUMS = "ranks see no sums"
_REFUSED = {
    "plan": _PLANNED_FROM_SIZES, "network": _PLANNED_FROM_SIZES, "tune": _PLANNED_FROM_SIZES, "knobs": _PLANNED_FROM_SIZES,
    "timeline": _NOTHING_RECORDED, "profile": _NOTHING_RECORDED, "progress": _NOTHING_RECORDED,
    "verify": _NO_SUMS, "check_finite": _NO_SUMS,
    "weight": "each rank has one connection to a server",
    "wire_dtype": "gradients travel as float32",
    "algorithm": "no all-reduce is made",
}  # fmt: skip
"""Options of the launcher that have no effect on servers that update parameters, and why not."""
_OPTIONS = {"timeline": "--timeline or --report", "profile": "`gradlane profile`"}
"""What a user has typed, where it is not the option's name."""


def _accepted(launched: LaunchOptions) -> LaunchOptions:
    """`launched`, if every option in it can be honoured here. Raises `InputError` for one that
    cannot.
    """
    for name, why in _REFUSED.items():
        if getattr(launched, name) not in (None, False):
            option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise InputError(
                f"the launcher gave {option}, and this script updates on its servers, where {why}: launch it without {option}"
            )
    if launched.backend not in (None, "server"):
        raise InputError(
            f"the launcher gave --backend {launched.backend}, and this script updates on its servers: launch it without that"
        )
    return launched
