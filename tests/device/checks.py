"""What the ranks run. A check returns a remark or nothing, raises where something is wrong, or raises `Skip`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.core.network import Network
from gradlane.errors import GradlaneError, PeerError, UnsupportedError
from tests.live import cases, verified
from tests.live import clipping as clipped
from tests.live.cases import bits_of, differences
from tests.live.loops.hopping import Hopping
from tests.live.loops.job import LOOPS, POLICIES, Job, under_ddp, under_drop_in, under_gradlane
from tests.live.models import MODELS, OPTIMIZERS, Convolutions
from tests.live.networks import slow_network
from tests.live.streams import streams_on_the_host

BOUND_S = 30.0  # in which the other ranks have to hear of one that is gone
STEPS = 10
EQUAL = {
    "all-reduce": ["ddp", "wfbp", ["bytescheduler", {"partition_bytes": 4000, "credit_bytes": 16000}], "dear", "blocks"],
    "server": ["ddp", ["bytescheduler", {"partition_bytes": 4000, "credit_bytes": 16000}], "mercury", "geryon"],
}


class Skip(Exception):
    """Why a check cannot be made here."""


@dataclasses.dataclass(frozen=True)
class Here:
    """Where a check runs."""

    rank: int
    world: int
    device: str
    backend: Any

    @property
    def network(self) -> Network:
        """Given to sessions, so that none measures it."""
        return Network.line(self.world, startup_ns=20_000, bytes_per_second=10**9)

    def attach(self, net: nn.Module, optimizer: Any, policy: str = "bytescheduler", **options: Any) -> Any:
        """A session that measures one iteration, on a network that is known."""
        chosen = gradlane.policies.get(policy, **({"partition_bytes": 4000, "credit_bytes": 16000} if "byte" in policy else {}))
        known = {"network": self.network, "profile_iterations": 1, "timeout": 30, "backend": self.backend, **options}
        return gradlane.attach(net, optimizer, chosen, **known)

    def late(self) -> contextlib.AbstractContextManager[Any]:
        """Sums arrive after `step()`, where the host hears of them: NCCL's are in a stream."""
        return slow_network() if dist.get_backend() == "gloo" else contextlib.nullcontext()

    def differs(self, reference: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
        """Names that differ: in a bit, or where more than two parts are summed in another order, by more than rounding."""
        if self.world <= 2:
            return differences(reference, found)
        return [
            name
            for name in sorted(set(reference) | set(found))
            if name not in reference
            or name not in found
            or not torch.allclose(reference[name].float(), found[name].float(), rtol=1e-3, atol=1e-4)
        ]


def run(rank: int, world: int, check: str, device: str, backend: Any, stand_in: bool, arguments: dict[str, Any]) -> str | None:
    """Make one check on this rank."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    streams = streams_on_the_host(late=False) if stand_in else contextlib.nullcontext()
    with streams, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function: Callable[..., str | None] = globals()[check]
        return function(Here(rank, world, device, backend), **arguments)


# -- beside DDP --------------------------------------------------------------------------------------------


Step = Callable[[nn.Module, Any, Any, torch.Tensor, torch.Tensor], None]


def plain(net: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(call(x), y).backward()
    optimizer.step()


def _trained(
    here: Here,
    scheduled: bool,
    model: Callable[[], nn.Module],
    optimizer: Callable[[Any], Any],
    step: Callable[[], Step],
    prepare: Callable[[nn.Module, Any], Any],
    between: Callable[[nn.Module], Any],
    policy: str,
) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    net = model().to(here.device)
    between(net)
    opt = optimizer(net.parameters())
    generator = torch.Generator().manual_seed(1000 + here.rank)
    once = step()
    with contextlib.ExitStack() as stack:
        call: Any = net
        if scheduled:
            stack.enter_context(here.late())
            session = stack.enter_context(here.attach(net, opt, policy))
        else:
            call = DistributedDataParallel(net)
        prepare(net, call)
        for _ in range(STEPS):
            x, y = net.batch(generator)
            once(net, call, opt, x.to(here.device), y.to(here.device))
        if scheduled:
            session.flush()
        return bits_of(net, opt)


def beside_ddp(
    here: Here,
    model: Callable[[], nn.Module],
    optimizer: Callable[[Any], Any] = OPTIMIZERS["sgd"],
    step: Callable[[], Step] = lambda: plain,
    prepare: Callable[[nn.Module, Any], Any] = lambda net, call: None,
    between: Callable[[nn.Module], Any] = lambda net: None,
    policy: str = "bytescheduler",
) -> None:
    """Train under DDP and under a session, and raise unless both end alike.

    Args:
        model: makes it, on the CPU; its `batch(generator)` makes inputs and labels there.
        optimizer: makes it of parameters.
        step: makes what runs one step, with its state.
        prepare: called with the model and what is called in its place, once these are wrapped or attached.
        between: called with the model once it is on the device, before it is wrapped or attached.
    """
    reference = _trained(here, False, model, optimizer, step, prepare, between, policy)
    differs = here.differs(reference, _trained(here, True, model, optimizer, step, prepare, between, policy))
    assert not differs, f"other bits than DDP's: {', '.join(differs[:8])} ({len(differs)} of {len(reference)})"


def equality(here: Here, model: str) -> None:
    if here.world > 2:
        return beside_ddp(here, MODELS[model], OPTIMIZERS["adam"])
    optimizer = "sgd" if model == "convolutions" else "adam"
    with here.late():
        found = cases.equals_ddp(
            here.rank, here.world, model, optimizer, EQUAL[here.backend], steps=12, device=here.device, backend=here.backend,
            network=here.network,
        )  # fmt: skip
    wrong = {policy: names[:5] for policy, names in found.items() if names}
    assert not wrong, f"other bits than DDP's, by policy: {wrong}"
    return None


def optimizer(here: Here, which: str) -> None:
    name, how = which.split(", ")
    beside_ddp(here, Convolutions, lambda params: _other(OPTIMIZERS[name](params), how))


def _other(optimizer: torch.optim.Optimizer, how: str) -> torch.optim.Optimizer:
    options = {
        key: value for key, value in optimizer.defaults.items() if key not in ("foreach", "fused", "decoupled_weight_decay")
    }
    return type(optimizer)(optimizer.param_groups[0]["params"], **options, **{how: True})


def compiled_block(here: Here) -> str:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that outlive the check
    torch.compiler.reset()
    backend = "inductor" if here.device == "cuda" else "aot_eager"
    beside_ddp(here, Convolutions, prepare=lambda net, call: net.classifier.compile(backend=backend))
    return backend


class _Wide(nn.Module):
    """Gradients of 5 MB, several buckets of DDP's."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(500, 500), nn.GELU(), nn.LayerNorm(500))]
        self.layers = nn.Sequential(nn.Linear(12, 500), *layers, nn.Linear(500, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def compiled_whole(here: Here) -> str:
    """A model that is compiled, then wrapped, as nanoGPT's: torch splits its graphs where DDP's buckets end."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    found = []
    for scheduled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(7)
        net = _Wide().to(here.device)
        opt = OPTIMIZERS["adam"](net.parameters())
        made = torch.compile(net, backend="inductor" if here.device == "cuda" else "aot_eager")
        generator = torch.Generator().manual_seed(1000 + here.rank)
        call: Any
        if scheduled:
            options = {"policy": _bytescheduler(), "network": here.network, "profile_iterations": 1, "timeout": 60}
            call = gradlane.DistributedDataParallel(made, options={**options, "backend": here.backend}, bucket_cap_mb=1)
        else:
            call = DistributedDataParallel(made, bucket_cap_mb=1)
        for _ in range(STEPS):
            x, y = _Parts.batch(generator)
            plain(net, call, opt, x.to(here.device), y.to(here.device))
        if scheduled:
            call.session.close()
        found.append(bits_of(net, opt))
    differs = here.differs(*found)
    assert not differs, f"other bits than DDP's: {', '.join(differs[:8])} ({len(differs)} of {len(found[0])})"
    return "inductor" if here.device == "cuda" else "aot_eager"


# -- loops -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _batches_on(device: str) -> Iterator[None]:
    def batch(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = job.model.batch(job.generator)
        return x.to(device), y.to(device)

    with patch.object(Job, "batch", batch):
        yield


_SUMS_LOSSES_IN_NO_ORDER = "tied_weights_and_attention"  # its NLLLoss, over positions, has no deterministic form on CUDA


def loop(here: Here, name: str) -> str:
    """A loop of tests/live/loops, under a plan that stays, and over all-reduce under plans that change and in the wrapper."""
    case = LOOPS[name]
    case = dataclasses.replace(case, model=lambda made=case.model: made().to(here.device))
    policy = gradlane.policies.get("mercury") if here.backend == "server" else _bytescheduler()
    wrong: list[str] = []
    unsteady: list[str] = []
    with _batches_on(here.device), here.late():
        try:
            reference = under_ddp(case, here.rank)
        except Exception as error:
            if here.device == "cpu":
                raise
            raise Skip(f"the loop does not run under DDP on {here.device}: {type(error).__name__}: {error}") from None
        for arm in ("plans that change", policy.name, "the drop-in") if here.backend == "all-reduce" else (policy.name,):
            if arm == "the drop-in":
                if case.attach:
                    continue
                found = under_drop_in(case, here.rank, here.world, policy)
            else:
                found = under_gradlane(case, here.rank, here.world, policy, arm == "plans that change", backend=here.backend)
            differs = here.differs(reference, found)
            if here.device != "cpu" and name == _SUMS_LOSSES_IN_NO_ORDER:
                differs = [each for each in differs if not each.endswith(":loss")]
            if differs:  # kernels that add in no order give DDP itself other bits each time
                anew = here.differs(reference, under_ddp(case, here.rank))
                unsteady += [name for name in differs if name in anew]
                differs = [name for name in differs if name not in anew]
            if differs:
                wrong.append(f"{arm}: {', '.join(differs[:5])}")
    assert not wrong, f"other bits than DDP's under {'; '.join(wrong)}"
    return f"two runs of DDP differ in {', '.join(sorted(set(unsteady)))}" if unsteady else ""


def _bytescheduler() -> Any:
    return gradlane.policies.get("bytescheduler", **POLICIES["bytescheduler"])


# -- clipping ----------------------------------------------------------------------------------------------


def clipping(here: Here, way: str, verify: bool = False, policy: str | None = None) -> str:
    """Gradients are clipped, scaled or read before each step."""
    policy = policy or ("mercury" if here.backend == "server" else "bytescheduler")
    differs, deferred = clipped.beside_ddp(
        here.rank, here.world, way, policy, verify, device=here.device, backend=here.backend
    )  # fmt: skip
    assert not differs, f"other bits than DDP's: {', '.join(differs[:8])}"
    return f"{deferred} updates deferred"


def default_device(here: Here) -> None:
    """The script makes its own tensors on the device."""
    policy = "mercury" if here.backend == "server" else "bytescheduler"
    torch.set_default_device(here.device)
    try:
        beside_ddp(here, _Parts, OPTIMIZERS["adam"], policy=policy)
    finally:
        torch.set_default_device(None)


def forked_workers(here: Here) -> None:
    """A DataLoader forks its workers anew in each epoch. They collect garbage, and have no device to free events of."""
    net = _Parts().to(here.device)
    opt = OPTIMIZERS["adam"](net.parameters())
    generator = torch.Generator().manual_seed(here.rank)
    with here.late(), here.attach(net, opt, "mercury" if here.backend == "server" else "bytescheduler") as session:
        if here.backend == "all-reduce":
            session._parts.controller = Hopping(here.rank)
        for _ in range(3):
            for _ in range(4):
                x, y = _Parts.batch(generator)
                plain(net, net, opt, x.to(here.device), y.to(here.device))
            worker = os.fork()
            if worker == 0:
                gc.collect()
                os._exit(0)
            _, status = os.waitpid(worker, 0)
            assert status == 0, f"a worker ended with status {status}, expected 0"


# -- faults ------------------------------------------------------------------------------------------------


def _until_it_fails(here: Here, before_step: Callable[[int], None]) -> tuple[GradlaneError, float]:
    """Train until the job fails: the error, and how many seconds after step 6 it came."""
    torch.manual_seed(7)
    net = Convolutions().to(here.device)
    opt = OPTIMIZERS["sgd"](net.parameters())
    session = here.attach(net, opt, timeout=20)
    generator = torch.Generator().manual_seed(here.rank)
    began = time.monotonic()
    try:
        for step in range(100_000):
            if step == 6:
                began = time.monotonic()
            before_step(step)
            x, y = net.batch(generator)
            plain(net, net, opt, x.to(here.device), y.to(here.device))
    except GradlaneError as error:
        return error, time.monotonic() - began
    except BaseException as error:
        session.abort(error)
        raise
    finally:
        session.close()
    raise AssertionError("the job went on")


def _hears_of(here: Here, culprit: int, error: GradlaneError, seconds: float) -> str:
    said = f"{type(error).__name__}: {error}"
    named = error.rank == culprit if isinstance(error, PeerError) else f"rank {culprit}" in str(error)
    assert named, f"the error does not name rank {culprit}: {said}"
    assert seconds <= BOUND_S, f"heard after {seconds:.1f} s, expected {BOUND_S:.0f} at most: {said}"
    return f"{type(error).__name__} after {seconds:.1f} s"


def killed(here: Here) -> str:
    """The last rank is killed in mid-training."""
    victim = here.world - 1

    def before_step(step: int) -> None:
        if here.rank == victim and step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    return _hears_of(here, victim, *_until_it_fails(here, before_step))


def raises(here: Here) -> str:
    """The last rank's script raises an exception between two steps."""
    culprit = here.world - 1

    def before_step(step: int) -> None:
        if here.rank == culprit and step == 6:
            raise LookupError("by the check")

    try:
        error, seconds = _until_it_fails(here, before_step)
    except LookupError:
        return ""
    assert "by the check" in str(error), f"the error does not say what was raised: {error}"
    return _hears_of(here, culprit, error, seconds)


# -- verify ------------------------------------------------------------------------------------------------


def verify_passes(here: Here) -> str:
    net = Convolutions().to(here.device)
    opt = OPTIMIZERS["adam"](net.parameters())
    generator = torch.Generator().manual_seed(here.rank)
    with here.late(), here.attach(net, opt, verify=gradlane.VerifyOptions(first=4, every=2)) as session:
        for _ in range(STEPS):
            x, y = net.batch(generator)
            plain(net, net, opt, x.to(here.device), y.to(here.device))
        session.flush()
    return ""


def planted_difference(here: Here) -> str:
    """An element of one sum is changed on rank 1."""
    said = verified.a_sum_is_damaged(here.rank, here.world, device=here.device, backend=here.backend)
    assert said.startswith(("VerificationError", "PeerFailed")), f"got {said!r}, expected a VerificationError"
    assert here.rank != 1 or said.startswith("VerificationError"), f"got {said!r}, expected a VerificationError on rank 1"
    return said.partition(":")[0]


# -- CUDA graphs -------------------------------------------------------------------------------------------


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(12, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh())
        self.head = nn.Linear(200, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 12, generator=generator, device="cpu"), torch.randint(6, (8,), generator=generator, device="cpu")


def captured_evaluation(here: Here) -> str:
    """An evaluation captured once and replayed after each step sees the weights of that step."""
    torch.manual_seed(7)
    net = _Parts().to(here.device)  # without buffers, which an eager evaluation may get from rank 0
    opt = OPTIMIZERS["sgd"](net.parameters())
    generator = torch.Generator().manual_seed(here.rank)
    with here.late(), here.attach(net, opt) as session:
        for _ in range(4):
            x, y = net.batch(generator)
            plain(net, net, opt, x.to(here.device), y.to(here.device))
        fixed = net.batch(torch.Generator().manual_seed(5))[0].to(here.device)

        def evaluate() -> torch.Tensor:
            net.eval()
            with torch.no_grad():
                out = net(fixed)
            net.train()
            return out

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            evaluate()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = evaluate()
        stale = []
        for step in range(6):
            x, y = net.batch(generator)
            plain(net, net, opt, x.to(here.device), y.to(here.device))
            graph.replay()
            replayed = out.clone()
            if not torch.equal(replayed, evaluate()):
                stale.append(step)
        session.flush()
    assert not stale, f"the replayed evaluation has other weights than the eager one after steps {stale}"
    return ""


def _refused_in_capture(here: Here, captures_backward: bool) -> str:
    """Capture `step()`, or the forward and the backward pass before it, and return what this is refused with."""
    torch.manual_seed(7)
    net = Convolutions().to(here.device)
    opt = OPTIMIZERS["sgd"](net.parameters())
    x, y = (part.to(here.device) for part in net.batch(torch.Generator().manual_seed(here.rank)))
    session = here.attach(net, opt)
    for _ in range(4):
        plain(net, net, opt, x, y)
    opt.zero_grad()
    if not captures_backward:
        F.cross_entropy(net(x), y).backward()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            if captures_backward:
                F.cross_entropy(net(x), y).backward()
            else:
                opt.step()
    except BaseException as error:
        chain: BaseException | None = error
        while chain is not None:  # the end of a capture that has failed raises too
            if isinstance(chain, (UnsupportedError, PeerError)):  # another rank may have come there first
                assert "graph" in str(chain).lower() or "captur" in str(chain).lower(), f"names no capture: {chain}"
                return str(chain)[:100]
            chain = chain.__cause__ or chain.__context__
        raise AssertionError(f"got {type(error).__name__}: {error}, expected an UnsupportedError") from error
    finally:
        with contextlib.suppress(Exception):  # the capture may have left the device unusable
            session.close()
    raise AssertionError("got a capture without an error, expected an UnsupportedError")


def captured_backward(here: Here) -> str:
    return _refused_in_capture(here, captures_backward=True)


def captured_step(here: Here) -> str:
    return _refused_in_capture(here, captures_backward=False)


def graphed_part(here: Here) -> None:
    """A part that `make_graphed_callables` was applied to before attach."""

    def between(net: Any) -> None:
        sample = torch.randn(8, 12, generator=torch.Generator().manual_seed(3)).to(here.device)
        net.part = torch.cuda.make_graphed_callables(net.part, (sample,))

    beside_ddp(here, _Parts, between=between)


# -- side streams ------------------------------------------------------------------------------------------


class _Branched(nn.Module):
    """A branch on a side stream uses a weight that the script's own stream uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 256)
        self.shared = nn.Linear(256, 256)
        self.alone = nn.Linear(256, 256)
        self.head = nn.Linear(256, 6)
        self.side: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side = self.side or torch.cuda.Stream()
        ours = torch.cuda.current_stream()
        x = torch.tanh(self.first(x))
        self.side.wait_stream(ours)
        with torch.cuda.stream(self.side):
            branch = torch.tanh(self.alone(self.shared(x)))
        x.record_stream(self.side)
        trunk = torch.tanh(self.shared(x))
        ours.wait_stream(self.side)
        branch.record_stream(ours)
        return self.head(trunk + branch)

    batch = staticmethod(_Parts.batch)


def side_stream(here: Here) -> None:
    beside_ddp(here, _Branched)


# -- mixed precision ---------------------------------------------------------------------------------------


def autocast(here: Here) -> None:
    def step(net: nn.Module, call: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        opt.zero_grad()
        with torch.autocast(here.device, dtype=torch.bfloat16):
            loss = F.cross_entropy(call(x), y)
        loss.backward()
        opt.step()

    beside_ddp(here, Convolutions, step=lambda: step)


def scaled(here: Here, clips: bool = False) -> str:
    """With a GradScaler whose first scale overflows, so that steps are left out."""
    scales: list[list[float]] = []

    def stepper() -> Step:
        scaler = torch.amp.GradScaler(here.device, init_scale=2.0**20, growth_interval=3)
        scales.append([])

        def step(net: nn.Module, call: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
            opt.zero_grad()
            with torch.autocast(here.device, dtype=torch.float16):
                loss = F.cross_entropy(call(x), y)
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
            scales[-1].append(scaler.get_scale())

        return step

    beside_ddp(here, Convolutions, step=stepper)
    assert scales[0] == scales[1], f"scales under DDP {scales[0]}, here {scales[1]}"
    return f"scale {scales[0][0]:g} to {scales[0][-1]:g}"


# -- host synchronisations ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _counting_synchronisations() -> Iterator[list[str]]:
    """Yields a list that gets a line for each operation that makes the host wait for the device."""
    texts: list[str] = []
    waits: list[str] = []

    def noted(name: str, really: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            waits.append(name)
            return really(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")):
            title = f"{getattr(owner, '__name__', owner)}.{name}"
            stack.enter_context(patch.object(owner, name, noted(title, getattr(owner, name))))
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield texts
        finally:
            torch.cuda.set_sync_debug_mode("default")
            texts += [str(one.message) for one in said if "synchroniz" in str(one.message)] + waits


def synchronisations(here: Here) -> str:
    """Steps under the policy `ddp` make the host wait for the device no more often than DDP's do: never."""
    counts = {}
    for arm in ("DDP", "gradlane"):
        torch.manual_seed(7)
        net = Convolutions().to(here.device)
        opt = OPTIMIZERS["sgd"](net.parameters())
        x, y = (part.to(here.device) for part in net.batch(torch.Generator().manual_seed(here.rank)))
        with contextlib.ExitStack() as stack:
            call: Any = net
            if arm == "DDP":
                call = DistributedDataParallel(net)
            else:
                stack.enter_context(here.attach(net, opt, "ddp"))
            for _ in range(8):
                plain(net, call, opt, x, y)
            with _counting_synchronisations() as control:
                float(x[0, 0, 0, 0])
            assert control, "the count is wrong: reading a number from the device was not noticed"
            with _counting_synchronisations() as counted:
                for _ in range(5):
                    plain(net, call, opt, x, y)
            counts[arm] = counted
    assert not counts["gradlane"], f"{len(counts['gradlane'])} in 5 steps (DDP {len(counts['DDP'])}): {counts['gradlane'][:5]}"
    return f"0 in 5 steps, DDP {len(counts['DDP'])}"
