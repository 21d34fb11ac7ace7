"""Faults inside ranks: disagreement, another order, strangers at the door, and what a session leaves behind."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import gradlane
from gradlane.errors import GradlaneError, JobError, UnsupportedError
from gradlane.live.backends.base import Measured
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.comm.control_frames import HEADER, VERSION, Frame
from gradlane.live.session import gradient_groups
from gradlane.live.startup import attach, networks
from gradlane.live.startup.validation import job_of
from gradlane.live.torch_versions import timeout_of
from gradlane.schedule import Dispatcher, Engine
from tests.live.cases import bits_of, differences, train, under_ddp
from tests.live.loops import GIVEN, POLICIES, Mlp, log_lines, momentum
from tests.live.models import MODELS, OPTIMIZERS
from tests.live.networks import counting_deferred_updates, slow_network
from tests.live.streams import streams_on_the_host


def attach_differently(rank: int, world: int, difference: str) -> tuple[str, str]:
    model: nn.Module = Mlp()
    options: dict[str, Any] = {}
    policy = gradlane.policies.get("bytescheduler")
    optimizer = momentum(model)
    if rank == 1:
        match difference:
            case "shape":
                model.layers[0] = nn.Linear(13, 40)
            case "dtype":
                model = model.double()
            case "name":
                model.layers[3].offset = model.layers[3].bias
                del model.layers[3].bias
            case "count":
                model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
            case "buffer":
                model.register_buffer("seen", torch.zeros(1))
            case "policy":
                policy = gradlane.policies.get("p3")
            case "knob":
                policy = gradlane.policies.get("bytescheduler", partition_bytes=1000)
            case "order":
                options["order"] = "coordinator"
            case "optimizer":
                optimizer = torch.optim.Adam(model.parameters())
            case "backend":
                options["backend"] = "server"
            case "option":
                options["broadcast_buffers"] = False
    try:
        gradlane.attach(model, optimizer, policy, network=GIVEN, timeout=10, **options)
    except GradlaneError as error:
        return type(error).__name__, str(error)
    return "attached", ""


def attach_on_one_rank(rank: int, world: int, missing: int) -> tuple[str, str, float]:
    began = time.monotonic()
    if rank != missing:
        try:
            gradlane.attach(Mlp(), network=GIVEN, timeout=1)
        except GradlaneError as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def timeouts(rank: int, world: int) -> tuple[float, float, float]:
    """For how long a job waits that is attached to a group with a timeout of its own, and where `attach` is given another."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=77))
    session = gradlane.attach(Mlp(), network=GIVEN, backend="all-reduce", process_group=group)
    waits = session._failures._timeout_s
    session.close()
    given = job_of(Mlp(), None, group, 5.0).timeout_s
    alone = timeout_of(None)
    dist.destroy_process_group(group)
    return waits, given, alone


def _attached(rank: int, backend: Any = "all-reduce", **more: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(7)
    model = Mlp()
    optimizer = momentum(model)
    policy = gradlane.policies.get("bytescheduler", **POLICIES["bytescheduler"])
    options: dict[str, Any] = {"network": GIVEN, "profile_iterations": 1, "timeout": 20, "backend": backend, **more}
    return model, optimizer, gradlane.attach(model, optimizer, policy, **options)


def _step(model: Any, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    x, y = model.batch(generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def another_order(rank: int, world: int, fault: str) -> tuple[str, str, list[str], float]:
    """From iteration 5 on, rank 1 sends two messages in the other order, or says that it did."""
    model, optimizer, session = _attached(rank)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        _step(model, optimizer, generator)
    session.flush()
    dist.barrier()  # or rank 1 fails while rank 0 still hears of the ends of iteration 4
    good = bits_of(model, optimizer)
    if rank == 1 and fault == "swap":
        first, second, *rest = session.plan.sequence or ()
        session._driver._carrier.engine._dispatcher = Dispatcher(replace(session.plan, sequence=(second, first, *rest)))
    elif rank == 1:
        session._driver._carrier.rolling_hashes[0] += 1
    began, failed = time.monotonic(), JobError("nothing")
    try:
        while True:
            _step(model, optimizer, generator)
            if fault == "hash":
                session.flush()
    except JobError as error:
        failed = error
    seconds = time.monotonic() - began
    session.close()
    wrong = []
    if fault == "swap":  # a wrong hash is known only after sums that were right in fact
        wrong = differences(good, _bits_beneath(model, optimizer))
        wrong += [f"{name}.grad" for name, param in model.named_parameters() if param.grad is not None]
    return type(failed).__name__, str(failed), wrong, seconds


def _bits_beneath(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What `bits_of` gives, also of what refuses to be read. Which that is depends on what comes first: that a rank hears
    of the failure, or that its `step()` defers updates.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return bits_of(model, SimpleNamespace(state=object.__getattribute__(optimizer, "state")))  # type: ignore[arg-type]


def raises_in_a_callback(rank: int, world: int, method: str) -> tuple[str, str, str, float]:
    """Rank 1's code that torch.distributed calls at the end of a sum raises in iteration 4: what each rank hears of it, the
    cause of that, and after how many seconds.
    """
    halves = {} if method == "_leave" else {"wire_dtype": "bf16"}  # whose sums have to be copied
    owner = Engine if method == "_leave" else MessageBuffer
    really, raises = getattr(owner, method), False

    def called(*args: Any) -> Any:
        if raises:
            raise LookupError("by the test")
        return really(*args)

    with patch.object(owner, method, called):
        model, optimizer, session = _attached(rank, **halves)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            _step(model, optimizer, generator)
        session.flush()
        began, failed, raises = time.monotonic(), JobError("nothing"), rank == 1
        try:
            for _ in range(100):
                _step(model, optimizer, generator)
        except JobError as error:
            failed = error
    seconds = time.monotonic() - began
    session.close()
    return type(failed).__name__, str(failed), repr(failed.__cause__), seconds


def left_between_two_steps(rank: int, world: int, backend: str) -> dict[str, Any]:
    """Rank 1 fails in a backward pass after the last layer's gradients; rank 0 has stepped by then.

    Returns:
        Of rank 0: whether the last layer was updated, what reading the other parameters raises, before
        `close` and after it, and whether a checkpoint mends model and optimizer.
    """
    with patch.object(gradient_groups, "_MOST_BYTES", 0):  # gradients are sent one by one
        model, optimizer, session = _attached(rank, backend)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            _step(model, optimizer, generator)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    before = bits_of(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:

        def fail(gradient: torch.Tensor) -> None:
            store.wait(["stepped"])
            raise LookupError("by the test")

        model.get_parameter(names[0]).register_hook(fail)  # before this gradient is accumulated
        try:
            _step(model, optimizer, generator)
        except LookupError as error:
            session.abort(error)
        session.close()
        return {}
    _step(model, optimizer, generator)
    last = model.get_parameter(names[-1])
    told: dict[str, Any] = {"updated": not torch.equal(last, before[names[-1]])}
    store.set("stepped", "")
    told["open"] = [_reads(model, optimizer), _reads(model, optimizer)]
    session.close()
    told["closed"] = [_reads(model, optimizer), _reads(model, optimizer)]
    others = {"deepcopy": lambda: copy.deepcopy(model), "script": lambda: torch.jit.script(model)}
    others["call"] = lambda: model(Mlp.batch(generator)[0])
    told["others"] = {name: _raised(call) for name, call in others.items()}
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    told["mended"] = differences(before, bits_of(model, optimizer))
    told["classes"] = sorted({type(each).__name__ for each in (optimizer, *model.parameters())})
    return told


ENDS: dict[str, type[BaseException]] = {
    "an exception": LookupError,
    "Ctrl-C": KeyboardInterrupt,
    "sys.exit": SystemExit,
    "a generator that is closed": GeneratorExit,
}


def leaves_its_block(rank: int, world: int, backend: str, end: str, alone: bool) -> tuple[int, list[str], str]:
    """An exception leaves the `with` block between two steps, on rank 1 after rank 0 or on rank 1 alone. The script catches it.

    Returns:
        How many updates were deferred then, what differs from DDP in model and optimizer, and the error of rank 0 where that
        trains on alone.
    """
    steps = 8
    reference = under_ddp("convolutions", "sgd", steps, rank)
    store = dist.distributed_c10d._get_default_store()
    error = ENDS[end]("by the test")
    torch.manual_seed(7)
    net = MODELS["convolutions"]()
    opt = OPTIMIZERS["sgd"](net.parameters())
    policy = gradlane.policies.get("bytescheduler", partition_bytes=20_000, credit_bytes=80_000)

    def block() -> Generator[None, None, None]:
        with gradlane.attach(net, opt, policy, backend=backend, network=GIVEN, profile_iterations=1, timeout=20):
            train(net, net, opt, net.batch, steps, rank)
            yield
            train(net, net, opt, net.batch, steps, rank)

    with slow_network() as slow, counting_deferred_updates() as deferred:
        slow.delay_s = 0.05
        run = block()
        next(run)
        before = sum(deferred)
        if rank == 1 and not alone:
            store.wait(["left"])
        if rank == 0 and alone:
            try:
                next(run)
            except JobError as failed:
                return 0, [], f"{type(failed).__name__}: {failed}"
        with contextlib.suppress(type(error)):
            run.throw(error)
        if not alone:
            store.set("left", "")
        return sum(deferred) - before, differences(reference, bits_of(net, opt)), ""


def _reads(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What reading each parameter, the model's and the optimizer's state raises, if anything."""
    calls = {name: param.clone for name, param in model.named_parameters()}
    calls |= {"state_dict": model.state_dict, "state": lambda: optimizer.state, "optimizer": optimizer.state_dict}
    return {name: text for name, call in calls.items() if (text := _raised(call))}


def _raised(call: Any) -> str:
    try:
        call()
    except JobError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def interpreter_that_stands_still(
    rank: int, world: int, backend: str, culprit: int, seconds: float, **options: Any
) -> tuple[list[str], list[str]]:
    """What a long call that keeps the interpreter's lock changes in one rank's job, and what is said about it."""
    if backend == "server":
        options["summation_order"] = "rank"
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradlane").addHandler(listener)

    def bits(pause: bool) -> dict[str, torch.Tensor]:
        model, optimizer, session = _attached(rank, backend, **options)
        generator = torch.Generator().manual_seed(rank)
        for step in range(8):
            if pause and step == 4 and rank == culprit:
                ctypes.PyDLL(None).usleep(round(seconds * 1e6))
            _step(model, optimizer, generator)
        session.flush()
        session.close()
        return bits_of(model, optimizer)

    try:
        return differences(bits(False), bits(True)), lines
    finally:
        logging.getLogger("gradlane").removeHandler(listener)


def a_slow_rank(rank: int, world: int, backend: str, slow: dict[int, float], steps: int) -> list[str]:
    """What is said about ranks whose passes take longer by the seconds in `slow`."""
    with log_lines() as lines:
        model, optimizer, session = _attached(rank, backend)
        model.register_forward_pre_hook(lambda *_: time.sleep(slow.get(rank, 0)))
        generator = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            _step(model, optimizer, generator)
        dist.barrier()  # what rank 0 has heard by then, it has judged or will judge before it closes
        session.close()
    return [line for line in lines if "slows the job" in line]


def _is_refused(stranger: socket.socket) -> bool:
    """Whether rank 0 closes the connection (the beats of a rank that it took for its own would arrive here)."""
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def junk_on_the_control_port(rank: int, world: int) -> tuple[list[str], dict[str, bool]]:
    """Rank 1 trains as before, and knocks at rank 0's door in every bad way."""
    alone, its_optimizer, session = _attached(rank)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(8):
        _step(alone, its_optimizer, generator)
    session.close()
    model, optimizer, session = _attached(rank)
    generator = torch.Generator().manual_seed(rank)
    refused: dict[str, bool] = {}
    with contextlib.ExitStack() as strangers:

        def knock(data: bytes) -> socket.socket:
            stranger = strangers.enter_context(socket.create_connection(address, timeout=10))
            stranger.sendall(data)
            return stranger

        for step in range(8):
            if rank == 1 and step == 3:
                address = session._driver.coordination.channel._protocol._by_rank[0].socket.getpeername()
                for _ in range(200):
                    knock(b"")
                doors = {
                    "random": knock(os.urandom(4096)),
                    "http": knock(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
                    "huge": knock(HEADER.pack(b"GLP1", Frame.HELLO, VERSION, 0, 1, 2**32 - 1)),
                    "version": knock(HEADER.pack(b"GLP1", Frame.HELLO, 9, 0, 1, 32) + b"0" * 32),
                    "token": knock(HEADER.pack(b"GLP1", Frame.HELLO, VERSION, 0, 1, 32) + b"0" * 32),
                    "rank": knock(HEADER.pack(b"GLP1", Frame.HELLO, VERSION, 0, 7, 32) + b"0" * 32),
                    "twice": knock(HEADER.pack(b"GLP1", Frame.FAIL, VERSION, 0, 1, 5) + b"\3\0\0\0\0"),
                }
                refused = {name: _is_refused(door) for name, door in doors.items()}
            _step(model, optimizer, generator)
        session.flush()
        wrong = differences(bits_of(alone, its_optimizer), bits_of(model, optimizer))
        session.close()
    return wrong, refused


def census() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    return {
        "threads": threading.active_count(),
        "native threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def attach_and_close_often(rank: int, world: int, backend: str) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Threads and descriptors after one session and after six, and the hooks that are left."""

    def train_and_close() -> nn.Module:
        model, optimizer, session = _attached(rank, backend)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            _step(model, optimizer, generator)
        session.close()
        assert not any("gradlane" in thread.name for thread in threading.enumerate())
        hooks = [name for name in vars(model) if name.endswith("hooks") and vars(model)[name]]
        hooks += [name for name in vars(optimizer) if name.endswith("hooks") and vars(optimizer)[name]]
        hooks += [name for name, param in model.named_parameters() if param._post_accumulate_grad_hooks]
        left.extend(hooks)
        return model

    left: list[str] = []
    train_and_close()
    before = census()
    for _ in range(5):
        train_and_close()
    return before, census(), left


def leave_in_attach(rank: int, world: int) -> str:
    """Rank 1's handler of SIGTERM calls sys.exit while attach measures the network; what each rank raises."""
    networks._known.clear()
    measure = ParameterServerBackend.measure

    def leave(backend: ParameterServerBackend) -> Measured:
        if rank == 1:
            sys.exit(143)
        return measure(backend)

    try:
        with patch.object(ParameterServerBackend, "measure", leave):
            gradlane.attach(Mlp(), None, "mercury", backend="server", timeout=20)
    except (GradlaneError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "attached"


def connect_late(rank: int, world: int) -> tuple[float, float]:
    """Rank 1 makes its last connections of `attach` half a second late; when it has made them, and when `attach` returns."""
    made_at = 0.0
    really = attach._verifier

    def late(*arguments: Any) -> Any:
        nonlocal made_at
        time.sleep(0.5 * rank)
        verifier = really(*arguments)
        made_at = time.monotonic()
        return verifier

    with patch.object(attach, "_verifier", late):
        session = gradlane.attach(Mlp(), None, "wfbp", network=GIVEN, timeout=20)
    returned_at = time.monotonic()
    session.close()
    return made_at, returned_at


def refused_in_streams(rank: int, world: int, **options: Any) -> str:
    """What an option is refused with where sums take their turn in a device's streams."""
    with streams_on_the_host(late=False, orders=True):
        try:
            _attached(rank, **options)
        except UnsupportedError as error:
            return str(error)
    return ""


def not_finite_with_streams(rank: int, world: int, late: bool, **case: Any) -> Any:
    """As `not_finite`, with the CPU taken for a device with streams."""
    with streams_on_the_host(late):
        return not_finite(rank, world, **case)


def not_finite_at_attach(rank: int, world: int) -> tuple[str, str]:
    """How attach ends with `check_finite` where rank 0, whose parameters all get, has one that is NaN."""
    model = Mlp()
    with torch.no_grad():
        model.layers[1].bias[3] = float("nan") if rank == 0 else 0.0
    try:
        gradlane.attach(model, momentum(model), network=GIVEN, timeout=20, check_finite=True).close()
    except GradlaneError as error:
        return type(error).__name__, str(error)
    return "", ""


def not_finite(rank: int, world: int, backend: str, culprit: int, how: str, value: float, **options: Any) -> Any:
    """How a job with `check_finite` ends if a gradient of one rank is `value` in step 4 (from 0): the error's type, text and
    rank, after how many steps it came, and whether parameters are finite.

    how: "crossing" defers updates, "barrier" does not, "scaler" steps with a GradScaler, "fused" with one and a fused
    optimizer.
    """
    if backend == "server":
        options["summation_order"] = "rank"
    model, optimizer, session = _attached(rank, backend, check_finite=True, cross_barrier=how == "crossing", **options)
    if how == "fused":
        session.close()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
        session = gradlane.attach(model, optimizer, network=GIVEN, backend=backend, check_finite=True, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if how in ("scaler", "fused") else None
    generator = torch.Generator().manual_seed(rank)
    done = 0
    weight = model.layers[3].weight
    step = 0
    handle = weight.register_hook(lambda gradient: gradient + (value if rank == culprit and step == 4 else 0.0))
    try:
        for step in range(8):  # noqa: B007  (the hook looks at it)
            if scaler is None:
                _step(model, optimizer, generator)
            else:
                x, y = model.batch(generator)
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            done += 1
        session.flush()
        outcome: tuple[Any, ...] = ("", "", None)
    except GradlaneError as error:
        outcome = type(error).__name__, str(error), getattr(error, "rank", None)
    finally:
        handle.remove()
        session.close()
    readable = [param for param in model.parameters() if not _raised(param.clone)]  # updates of others were deferred
    finite = all(bool(param.isfinite().all()) for param in readable)
    return (*outcome, done, finite, None if scaler is None else scaler.get_scale())
