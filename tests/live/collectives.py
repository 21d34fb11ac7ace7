"""What the ranks of test_c10d.py do: collectives over gradlane's backend, each beside an oracle in NumPy.

Values are small whole numbers, which every element type holds exactly, also as sums and products of all ranks.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from functools import reduce as fold
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gradlane.live.c10d as c10d
from gradlane.errors import GradlaneError
from gradlane.live.torch_versions import all_gather_single, reduce_scatter_single, timeout_of

_FOLDS = {"SUM": np.add, "AVG": np.add, "MIN": np.minimum, "MAX": np.maximum, "PRODUCT": np.multiply}
_groups: dict[str, Any] = {}


def group(**options: Any) -> Any:
    """The same process group for the same options, as long as the rank lives."""
    key = repr(sorted(options.items()))
    if key not in _groups:
        _groups[key] = dist.new_group(backend="gradlane", pg_options=c10d.Options(**options))
    return _groups[key]


def _numbers(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    numbers = np.random.default_rng((seed, rank)).integers(low, 4, shape)
    if dtype.is_complex:
        return numbers + 1j * np.random.default_rng((seed, rank, 1)).integers(-3, 4, shape)
    return numbers != 0 if dtype is torch.bool else numbers


def _tensor(numbers: np.ndarray, dtype: torch.dtype, layout: str) -> torch.Tensor:
    whole = torch.tensor(numbers).to(dtype)
    if layout == "negative":  # the memory has the numbers with the other sign
        return torch._neg_view(whole.neg()) if dtype is not torch.bool else whole
    if layout == "conjugate":
        return whole.conj_physical().conj() if dtype.is_complex else whole
    if layout == "transposed":
        return whole.t().contiguous().t() if whole.dim() == 2 else whole
    if layout == "strided":
        return torch.stack([whole, torch.zeros_like(whole)], dim=-1)[..., 0]
    return whole


def _expect(got: torch.Tensor, expected: np.ndarray, dtype: torch.dtype, what: str) -> None:
    wanted = torch.from_numpy(np.ascontiguousarray(expected)).to(dtype)
    assert got.dtype is dtype, what
    assert torch.equal(got, wanted.view_as(got)), f"{what}: got {got.flatten()[:8]}, expected {wanted.flatten()[:8]}"


def _reduced(parts: list[np.ndarray], op: str, dtype: torch.dtype) -> np.ndarray:
    total = fold(_FOLDS[op], parts)
    if op != "AVG":
        return total
    return total / len(parts) if dtype.is_floating_point else np.trunc(total / len(parts)).astype(np.int64)


def check(
    rank: int, world: int, what: str, op: str, dtype: str, shape: tuple[int, ...], layout: str, root: int, seed: int
) -> None:
    """One collective of tensors of `shape` on each rank, with what every rank must have afterwards."""
    kind, over, said = getattr(torch, dtype), group(), getattr(dist.ReduceOp, op)
    whole_layout = layout if layout in ("negative", "conjugate") else "plain"  # of what torch wants contiguous
    parts = [_numbers(seed, each, shape, kind) for each in range(world)]
    lots = [[_numbers(seed, 100 * giver + taker, shape, kind) for taker in range(world)] for giver in range(world)]

    def tensor(numbers: np.ndarray) -> torch.Tensor:
        return _tensor(numbers, kind, layout)

    def empty() -> torch.Tensor:
        return tensor(np.zeros(shape, dtype=np.int64))

    if what == "all_reduce":
        mine = tensor(parts[rank])
        dist.all_reduce(mine, said, over)
        _expect(mine, _reduced(parts, op, kind), kind, what)
    elif what == "all_reduce_coalesced":
        several = [tensor(lots[rank][each]) for each in range(world)]
        over.allreduce(several, _options(said)).wait()
        for each, got in enumerate(several):
            _expect(got, _reduced([lots[giver][each] for giver in range(world)], op, kind), kind, what)
    elif what == "reduce":
        mine = tensor(parts[rank])
        dist.reduce(mine, root, said, over)
        _expect(mine, _reduced(parts, op, kind) if rank == root else parts[rank], kind, what)
    elif what == "reduce_scatter":
        mine = empty()
        dist.reduce_scatter(mine, [tensor(numbers) for numbers in lots[rank]], said, over)
        _expect(mine, _reduced([lots[giver][rank] for giver in range(world)], op, kind), kind, what)
    elif what == "reduce_scatter_tensor":
        mine = empty()
        given = np.concatenate([n.reshape(-1) for n in lots[rank]])
        reduce_scatter_single(mine, _tensor(given, kind, whole_layout), said, over)
        _expect(mine, _reduced([lots[giver][rank] for giver in range(world)], op, kind), kind, what)
    elif what == "broadcast":
        mine = tensor(parts[rank])
        over.broadcast([mine], _from_root(dist.BroadcastOptions, root)).wait()  # torch's own functions refuse conjugate views
        _expect(mine, parts[root], kind, what)
    elif what == "all_gather":
        got = [empty() for _ in range(world)]
        over.allgather([got], [tensor(parts[rank])]).wait()
        for each in range(world):
            _expect(got[each], parts[each], kind, what)
    elif what == "all_gather_into_tensor":
        whole = _tensor(np.zeros(world * int(np.prod(shape)), dtype=np.int64), kind, whole_layout)
        over._allgather_base(whole, tensor(parts[rank])).wait()
        _expect(whole, np.concatenate([numbers.reshape(-1) for numbers in parts]), kind, what)
    elif what == "gather":
        got = [empty() for _ in range(world)] if rank == root else None
        over.gather([got] if got else [], [tensor(parts[rank])], _from_root(dist.GatherOptions, root)).wait()
        for each in range(world) if rank == root else ():
            _expect(got[each], parts[each], kind, what)
    elif what == "scatter":
        mine = empty()
        given = [[tensor(numbers) for numbers in lots[root]]] if rank == root else []
        over.scatter([mine], given, _from_root(dist.ScatterOptions, root)).wait()
        _expect(mine, lots[root][rank], kind, what)
    elif what == "all_to_all":
        got = [empty() for _ in range(world)]
        over.alltoall(got, [tensor(numbers) for numbers in lots[rank]]).wait()
        for each in range(world):
            _expect(got[each], lots[each][rank], kind, what)
    elif what == "all_to_all_single":
        rows = [[(seed + 3 * giver + 2 * taker) % 4 for taker in range(world)] for giver in range(world)]
        given = [_numbers(seed, 100 * rank + taker, (rows[rank][taker], 3), kind) for taker in range(world)]
        takes = [rows[giver][rank] for giver in range(world)]
        whole = _tensor(np.zeros((sum(takes), 3), dtype=np.int64), kind, whole_layout)
        over.alltoall_base(whole, _tensor(np.concatenate(given), kind, whole_layout), takes, rows[rank]).wait()
        wanted = [_numbers(seed, 100 * giver + rank, (takes[giver], 3), kind) for giver in range(world)]
        _expect(whole, np.concatenate(wanted), kind, what)
    else:
        raise AssertionError(what)


def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _from_root(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


def mixed(rank: int, world: int) -> list[list[list[float]]]:
    """Sums, maxima and means of tensors of several dtypes in one call, in both orders; a mean of bools is refused."""
    over = group()
    ends = []
    for op, kinds in (("SUM", "bf"), ("SUM", "fb"), ("MAX", "bif"), ("AVG", "if"), ("AVG", "fi"), ("AVG", "fbi")):
        several = [_mine(kind, rank) for kind in kinds]
        try:
            over.allreduce_coalesced(several, _options(getattr(dist.ReduceOp, op))).wait()
        except GradlaneError:
            several = []
        ends.append([tensor.tolist() for tensor in several])
    return ends


def mixed_scatters(rank: int, world: int) -> list[float]:
    """A reduce-scatter in which every second rank gets truth values, whether any rank's is set, and the others sums."""
    inputs = [torch.tensor([rank == 0]) if each % 2 else torch.tensor([1.5 + rank]) for each in range(world)]
    output = torch.zeros_like(inputs[rank])
    group().reduce_scatter([output], [inputs]).wait()
    return output.tolist()


def _mine(kind: str, rank: int) -> torch.Tensor:
    """What `rank` gives of each dtype: bool, int64 or float32."""
    return {"b": torch.tensor([rank == 0]), "i": torch.tensor([rank, -3]), "f": torch.tensor([rank + 1.0, 0.25])}[kind]


def own_part(rank: int, world: int) -> list[list[float]]:
    """All-gathers whose own output is the memory of the input: as it is, negated, conjugated and transposed."""
    gotten: list[list[float]] = []
    for view in (lambda x: x, lambda x: torch._neg_view(x), lambda x: x.conj(), lambda x: x.t()):
        given = torch.tensor([[1 + 2j, 3], [4, 5j]])
        outputs = [given if each == rank else torch.zeros(2, 2, dtype=given.dtype) for each in range(world)]
        group().allgather([outputs], [view(given)]).wait()
        gotten.append(torch.view_as_real(given).flatten().tolist())
    return gotten


def objects(rank: int, world: int) -> tuple[list[Any], list[Any]]:
    over = group()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank}, group=over)
    told = ["from 0", rank]
    dist.broadcast_object_list(told, 0, group=over)
    dist.barrier(over)
    return gathered, told


def ahead(rank: int, world: int) -> list[float]:
    """Rank 0 is two calls ahead of the others, who wait for the first before they make the second."""
    over = group()
    total, sent = torch.full((200_000,), 1.0 + rank), torch.full((200_000,), 1.0 + rank)
    if rank == 0:
        sending = dist.broadcast(sent, 0, over, async_op=True)
        summing = dist.all_reduce(total, group=over, async_op=True)
        summing.wait()
        sending.wait()
    else:
        time.sleep(0.2)
        dist.broadcast(sent, 0, over)
        dist.all_reduce(total, group=over)
    more, also = torch.full((300_000,), 1.0 + rank), torch.full((9,), 1.0 + rank)
    summing = dist.all_reduce(more, group=over, async_op=True)
    if rank != 0:
        summing.wait()
    sending = dist.broadcast(also, 0, over, async_op=True)
    summing.wait()
    sending.wait()
    return [total.min().item(), total.max().item(), sent.max().item(), more.max().item(), also.max().item()]


def dropped(rank: int, world: int, times: int) -> float:
    """Works that nobody keeps: their memory must stay until the node is done with it."""
    over = group()
    for _ in range(times):
        dist.all_reduce(torch.ones(50_000), group=over, async_op=True)
    last = torch.ones(4)
    dist.all_reduce(last, group=over)
    return last.sum().item()


def urgent(rank: int, world: int, order: str) -> list[float]:
    over = group(order=order)
    many = [torch.full((40_000 + each,), float(rank + each)) for each in range(8)]
    works = []
    for each, tensor in enumerate(many):
        with c10d.priority(8 - each) if each % 2 else c10d.priority(3):
            works.append(dist.all_reduce(tensor, group=over, async_op=True))
    with_none = torch.full((3,), float(rank))
    works.append(dist.all_reduce(with_none, group=over, async_op=True))
    for work in reversed(works):
        work.wait()
    return [tensor.min().item() for tensor in [*many, with_none]]


def futures(rank: int, world: int) -> tuple[list[float], bool]:
    over = group()
    works = [dist.all_reduce(torch.full((1000,), float(rank + each)), group=over, async_op=True) for each in range(5)]
    values = [work.get_future().wait()[0].max().item() for work in works]
    return values, all(work.is_completed() and work.is_success() and work.exception() is None for work in works)


def disagree(rank: int, world: int, what: str) -> tuple[str, str, float]:
    """The kind and text of the error, and the seconds until it came, where the ranks' calls are not alike."""
    data = torch.ones(5000)
    if what in ("size", "parts"):
        data = torch.ones(5000 + rank)
    elif what == "small size":
        data = torch.ones(1 + rank)
    elif what == "type":
        data = data.to(torch.int32) if rank else data
    op = dist.ReduceOp.MAX if what == "op" and rank else dist.ReduceOp.SUM
    dist.barrier()
    began = time.monotonic()
    over = None
    try:  # the others may have failed while this rank still joins
        over = dist.new_group(backend="gradlane", timeout=timedelta(seconds=5))
        if what == "nothing" and rank == 0:
            over.barrier().wait(timedelta(seconds=0.5))
        elif what == "abort" and rank == 0:
            over.abort()
            over.barrier()
        elif what not in ("nothing", "abort"):
            for _ in range(3):
                if what == "parts" or (what == "call" and rank == 0):
                    given = [torch.ones(5000) if other == rank else data for other in range(world)]
                    over.alltoall([torch.zeros(5000) for _ in range(world)], given).wait()
                else:
                    dist.all_reduce(data, op, over)
        else:
            while (failure := over._node.failure()) is None:
                time.sleep(0.01)
            raise failure
    except GradlaneError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        if over is not None:
            dist.destroy_process_group(over)
    return "", "", time.monotonic() - began


def ids(rank: int, world: int, shared: bool) -> int:
    """How many ids of the group ten calls of `all_to_all` take."""
    over = dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=shared))
    got = [torch.zeros(3) for _ in range(world)]
    before = over._next_id
    for each in range(10):
        over.alltoall(got, [torch.full((3,), float(each + 10 * rank + other)) for other in range(world)]).wait()
        assert [int(tensor[2]) for tensor in got] == [each + 10 * other + rank for other in range(world)]
    dist.destroy_process_group(over)
    return over._next_id - before


def late(rank: int, world: int, shared: bool) -> int:
    """How many of several tensors changed after a wait for their sum had raised: until the group was gone, which ends the
    thread that could write to them.
    """
    changed = 0
    for limit_ms in (2, 5, 10, 20, 40):
        over = dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=shared))
        data = torch.ones(6 << 20)
        dist.barrier()
        work = dist.all_reduce(data, group=over, async_op=True)
        then = None
        try:
            work.wait(timedelta(milliseconds=limit_ms))
        except GradlaneError:
            then = data.clone()
        dist.destroy_process_group(over)
        changed += then is not None and not torch.equal(then, data)
    return changed


def refused(rank: int, world: int) -> list[str]:
    over = group()
    errors = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BXOR, over),
        lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16), group=over),
        lambda: dist.all_reduce(torch.ones(1, device="meta"), group=over),
        lambda: all_gather_single(torch.ones(world * 2 + 1), torch.ones(2), over),
    ):
        try:
            call()
        except GradlaneError as error:
            errors.append(type(error).__name__)
    whole = torch.ones(1)
    dist.all_reduce(whole, group=over)  # a refusal leaves the group as it was
    assert whole.item() == world
    return errors


def residue(rank: int, world: int) -> tuple[int, int, int]:
    """Threads, descriptors and entries that ten groups, made, used and destroyed, have left behind."""

    def held() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()

    def use() -> None:
        over = dist.new_group(backend="gradlane")
        work = dist.all_reduce(torch.ones(100_000), group=over, async_op=True)
        assert work.get_future().wait()[0][0].item() == world
        dist.destroy_process_group(over)

    use()
    dist.barrier()
    before = held()
    for _ in range(10):
        use()
    dist.barrier()
    after = held()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def parts(rank: int, world: int) -> float:
    """A group of the last two ranks."""
    over = dist.new_group([world - 2, world - 1], backend="gradlane")
    if rank < world - 2:
        return -1.0
    data = torch.full((7,), float(rank))
    dist.all_reduce(data, group=over)
    dist.broadcast(data, world - 1, over)
    dist.destroy_process_group(over)
    return data[0].item()


def trained(rank: int, world: int, backend: str) -> tuple[list[bytes], list[float]]:
    """The bits of a small network's weights after a few steps under DDP, and its losses."""
    # a Gloo group that one rank destroys while another still reads can hang there: the default group lives on
    over = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 10)
    )
    replica = nn.parallel.DistributedDataParallel(model, process_group=over, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(replica(torch.randn(16, 64)), torch.randint(10, (16,)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if backend != "gloo":
        dist.destroy_process_group(over)
    return [p.detach().numpy().tobytes() for p in (*model.parameters(), *model.buffers())], losses


def die(rank: int, world: int) -> tuple[str, int, float]:
    """Rank 0 ends without a word; what the others hear, whom it names, and after how many seconds."""
    over = group()
    data = torch.ones(1000)
    began = time.monotonic()
    try:
        dist.all_reduce(data, group=over)  # may have come to its end on rank 0 alone
        if rank == 0:
            os._exit(7)
        dist.all_reduce(data, group=over)
    except GradlaneError as error:
        return type(error).__name__, getattr(error, "rank", -1), time.monotonic() - began
    return "", -1, 0.0


def whole_job(rank: int, world: int) -> list[float]:
    """As people write it: the default group itself is gradlane's."""
    dist.destroy_process_group()
    _groups.clear()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, world, is_master=rank == 0) if world == 1 else _fresh_store(rank, world)
    dist.init_process_group("gradlane", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=77))
    assert (dist.get_backend(), timeout_of(None)) == ("gradlane", 77.0)
    data = torch.ones(3)
    dist.all_reduce(data)
    half = dist.new_group([0])
    alone = torch.full((2,), 5.0)
    if rank == 0:
        dist.all_reduce(alone, group=half)
    dist.barrier()
    dist.destroy_process_group()
    return [data[0].item(), alone[0].item()]


def _fresh_store(rank: int, world: int) -> Any:
    port = int(os.environ["MASTER_PORT"])
    return dist.PrefixStore("again", dist.TCPStore("127.0.0.1", port, world, is_master=False))
