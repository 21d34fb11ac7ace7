"""attach_to_servers: checks, agrees on and connects a job whose optimizer runs on parameter
servers.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch

import gradlane
from gradlane.core.backends import SummationOrder
from gradlane.core.fields import need, need_int
from gradlane.core.launch_options import LaunchOptions
from gradlane.errors import InputError, UnsupportedError
from gradlane.live.backends.addresses import own_address
from gradlane.live.backends.external_servers import meet_servers
from gradlane.live.remote_update.broadcasts import Broadcasts
from gradlane.live.remote_update.parameter_groups import ParameterGroups
from gradlane.live.remote_update.session import ServedSession
from gradlane.live.remote_update.states import place_states
from gradlane.live.remote_update.values import Values
from gradlane.live.startup import handshake
from gradlane.live.startup.lifecycle import forget, keep
from gradlane.live.startup.options import AttachOptions, launched
from gradlane.live.startup.validation import Optimizers, copy_from_rank_0, job_of, require_process_group
from gradlane.transport import UNBOUNDED, NodeOptions
from gradlane.transport.formation import form

_attachments = itertools.count()


def attach_to_servers(
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    staleness: int | None = 0,
    servers: int = 0,
    packet_bytes: int | None = None,
    summation_order: SummationOrder | None = None,
    broadcast_buffers: bool | None = None,
    process_group: Any = None,
    timeout: float = 60.0,
) -> ServedSession:
    """Train `model` with its parameters and the optimizer's state on servers, in CPU memory, over
    gradlane's transport.

    Call it on every rank after `init_process_group()`, in place of DistributedDataParallel.
    Parameters and buffers become rank 0's. The loop stays `zero_grad`, `backward`, `step`:
    gradients are sent during the backward pass, `step()` updates nothing on this rank, and in the
    next forward pass each parameter is waited for when it is first used.

    Args:
        model: with float32 parameters in CPU memory.
        optimizer: torch.optim.SGD, Adam or AdamW, one or several. Rank 0's state, if there is any,
            goes to the servers. Its options, such as the learning rate, may change between `step()`
            and the next backward pass.
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
        process_group: a group of all ranks; None for the default group.
        timeout: seconds after which waiting for a parameter is an error; more than the slowest rank
            needs for a step.

    Returns:
        The running session.

    Raises:
        UnsupportedError: the model or the optimizer cannot be used.
        InputError: an argument, or an option of the launcher, has a wrong value.
        MismatchError: ranks disagree.
        CapacityError: a server does not have the memory.
        CommunicationError: ranks or servers cannot be reached. All before any gradient is sent.
    """
    require_process_group()
    options = AttachOptions.of(None, _keywords(packet_bytes, summation_order, servers, timeout), _accepted(launched()))
    carrier, timeout = options.carrier, options.stepping.timeout
    if staleness is not None:
        need_int("staleness", staleness, 0, UNBOUNDED - 1)
    if staleness != 0:
        order = carrier.summation_order
        need(order is None, "summation_order", order, "none with staleness, where nothing is summed")
        need(not broadcast_buffers, "broadcast_buffers", broadcast_buffers, "False with staleness: ranks are not in step")
    job = job_of(model, optimizer, process_group, timeout)
    world, rank = job.world, job.rank
    # in registration order: about the order of use
    optimizers, params = job.optimizers, job.params[::-1]
    for name, param in params:
        if param.dtype != torch.float32 or param.device.type != "cpu":
            raise UnsupportedError(
                f"{name} is of {param.dtype} on {param.device}: servers update float32 in CPU memory; update on the workers "
                "(gradlane.attach)"
            )
    groups = ParameterGroups(optimizers, params)
    members = [groups.of(param) for _, param in params]
    states = [groups.states_of(param).get(param, {}) for _, param in params]
    has_state = any(states)
    terms = handshake.Terms(
        gradlane=gradlane.__version__,
        torch=str(torch.__version__),
        world_size=world,
        policy="updates on the servers",
        backend="server",
        order="none",
        optimizers=tuple(type(one).__name__ for one in optimizers),
        options={
            "staleness": staleness,
            "servers": carrier.servers,
            "packet_bytes": carrier.packet_bytes,
            "summation_order": carrier.summation_order,
            "broadcast_buffers": broadcast_buffers,
            "parameter groups": members,
            "rules": [rule.kind for rule in groups.rules()],
            "optimizer state": has_state,
        },
        tensors=job.described_tensors[::-1],
        buffers=job.described_buffers,
    )
    store = handshake.agree(terms, process_group, f"served/{next(_attachments)}", timeout)
    buffers = [buffer for buffer in model.buffers() if buffer.numel() > 0]
    copy_from_rank_0([param for param in model.parameters() if param.numel() > 0] + buffers, process_group)
    node_options = NodeOptions(
        world=world,
        servers=carrier.servers or world,
        rank=rank,
        server=None if carrier.servers else rank,
        tell_tables=carrier.servers > 0,
        generation=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        fingerprint=terms.fingerprint(),
        packet_bytes=carrier.packet_bytes or NodeOptions.packet_bytes,
        rank_order=carrier.summation_order == "rank",
    )
    if carrier.servers:
        node = meet_servers(store, node_options, own_address(), timeout, carrier.servers_store)
    else:
        node = form(store, node_options, own_address(), timeout)
    bound = UNBOUNDED if staleness is None else staleness
    synchronises = bool(buffers) and staleness == 0 and broadcast_buffers is not False
    try:
        values = Values(node, [param for _, param in params], members, groups.rules(), bound, timeout)
        if has_state:
            place_states(states, [param for _, param in params], values)
        in_step = Broadcasts(model, values, process_group, rank, timeout) if synchronises else None
    except BaseException:
        node.close()
        raise
    session = ServedSession(
        model, params, optimizers, groups, values, rank=rank, scale=1.0 / world if staleness == 0 else 1.0,
        staleness=staleness, buffers=in_step, after_close=forget,
    )  # fmt: skip
    keep(session)
    return session


def _keywords(packet_bytes: int | None, summation_order: SummationOrder | None, servers: int, timeout: float) -> dict[str, Any]:
    """The script's options as keywords of `gradlane.attach`."""
    carrier = {"backend": "server", "packet_bytes": packet_bytes, "summation_order": summation_order, "servers": servers}
    return {**carrier, "timeout": timeout}


def _accepted(launched: LaunchOptions) -> LaunchOptions:
    """`launched`, if every option in it can be honoured here. Raises `InputError` for one that
    cannot.
    """
    for name in ("policy", "plan", "network", "timeline", "profile"):
        if getattr(launched, name) is not None:
            raise InputError(
                f"the launcher gave a {name}, and this script updates on its servers: the wire's priority decides there and "
                f"nothing is recorded; launch it without --{name}"
            )
    need(launched.backend in (None, "server"), "backend", launched.backend, "'server', since the update is on the servers")
    return launched
