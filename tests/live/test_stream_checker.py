"""`CheckedStreams` finds each edge that is missing between streams, with both places, and nothing where none is missing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.live.session.deferred_step import as_at_step
from gradlane.testing.streams import CheckedEvent, CheckedStreams, Race

HERE = "live/test_stream_checker.py"
late_or_early = pytest.mark.parametrize("late", [True, False], ids=["late", "early"])


@contextlib.contextmanager
def watched(streams: CheckedStreams) -> Iterator[None]:
    """`watching`, of what may race: see `races` afterwards."""
    try:
        with streams.watching():
            yield
    except AssertionError as error:
        if "not ordered" not in str(error):
            raise


# -- an edge that is missing, and the same with it -----------------------------------------------------------
# Each takes streams and whether the edge is there, and yields the operations that race without it: what it has allocated is
# there until it is closed.

Case = Iterator[tuple[str, str]]


def ready_event(streams: CheckedStreams, edge: bool) -> Case:
    gradient, total = torch.zeros(4), torch.zeros(4)
    allocated = streams.so_far()
    gradient.add_(1)
    end = streams.open().run(lambda: total.copy_(gradient), after=[streams.so_far() if edge else allocated])
    streams.join(end)
    yield "aten.add_.Tensor", "aten.copy_.default"


def end_of_a_sum(streams: CheckedStreams, edge: bool) -> Case:
    gradient = torch.ones(4)
    end = streams.open().run(lambda: gradient.mul_(2), after=[streams.so_far()])
    if edge:
        streams.join(end)
    torch.ones(4).add_(gradient)
    yield "aten.mul_.Tensor", "aten.add_.Tensor"


def end_of_a_copy_up(streams: CheckedStreams, edge: bool) -> Case:
    slot = torch.ones(4)
    pinned = streams.host_memory(slot)
    down, up = streams.open(), streams.open()
    down.run(lambda: pinned.copy_(slot, non_blocking=True), after=[streams.so_far()]).synchronize()
    streams.host_accesses(pinned, writes=True)
    end = up.run(lambda: slot.copy_(pinned, non_blocking=True))
    if edge:
        streams.join(end)
    slot.sub_(1)
    yield "aten.copy_.default", "aten.sub_.Tensor"


def pinned_memory_used_again(streams: CheckedStreams, edge: bool) -> Case:
    one, other = torch.ones(4), torch.ones(4)
    pinned = streams.host_memory(one)
    down, up = streams.open(), streams.open()
    up_end = up.run(lambda: one.copy_(pinned, non_blocking=True), after=[streams.so_far()])
    ready = [streams.so_far()]
    streams.join(down.run(lambda: pinned.copy_(other, non_blocking=True), after=[*ready, up_end] if edge else ready))
    streams.join(up_end)
    yield "aten.copy_.default", "aten.copy_.default"


def read_by_the_host(streams: CheckedStreams, edge: bool) -> Case:
    slot = torch.ones(4)
    pinned = streams.host_memory(slot)
    end = streams.open().run(lambda: pinned.copy_(slot, non_blocking=True), after=[streams.so_far()])
    if edge:
        end.synchronize()
    streams.host_accesses(pinned, writes=False)
    yield "aten.copy_.default", "code of the host"


def read_by_an_operation_of_the_host(streams: CheckedStreams, edge: bool) -> Case:
    slot = torch.ones(4)
    pinned = streams.host_memory(slot)
    end = streams.open().run(lambda: pinned.copy_(slot, non_blocking=True), after=[streams.so_far()])
    if edge:
        end.synchronize()
    pinned.sum()
    yield "aten.copy_.default", "aten.sum.default"


def still_sent_by_the_host(streams: CheckedStreams, edge: bool) -> Case:
    """The transport reads from when it is told until it has sent; the next copy down comes in between."""
    slot = torch.ones(4)
    pinned = streams.host_memory(slot)
    down = streams.open()
    down.run(lambda: pinned.copy_(slot, non_blocking=True), after=[streams.so_far()]).synchronize()
    streams.host_accesses(pinned, writes=False)
    if edge:
        streams.host_accesses(pinned, writes=False)
    down.run(lambda: pinned.copy_(slot, non_blocking=True), after=[streams.so_far()])
    if not edge:
        streams.host_accesses(pinned, writes=False)
    yield "aten.copy_.default", "code of the host"


def freed_without_record_stream(streams: CheckedStreams, edge: bool) -> Case:
    stream = streams.open()
    total = torch.zeros(4)
    temporary = torch.ones(4)
    if edge:
        streams.used_by(temporary, stream)
    end = stream.run(lambda temporary=temporary: total.add_(temporary), after=[streams.so_far()])
    del temporary
    streams.join(end)
    yield "aten.add_.Tensor", "the allocator"


def freed_after_it_was_joined(streams: CheckedStreams, edge: bool) -> Case:
    """As before, kept until the end is joined instead."""
    stream = streams.open()
    total = torch.zeros(4)
    temporary = torch.ones(4)
    kept = [temporary] if edge else []
    end = stream.run(lambda temporary=temporary: total.add_(temporary), after=[streams.so_far()])
    del temporary
    streams.join(end)
    kept.clear()
    yield "aten.add_.Tensor", "the allocator"


def second_side_stream(streams: CheckedStreams, edge: bool) -> Case:
    side = streams.open()
    weight = torch.ones(4)
    end = streams.open().run(lambda: weight.mul_(2), after=[streams.so_far()])
    streams.join(end)
    weight.sum()
    with streams.entered(side):
        if edge:
            streams.join(end)
        weight.neg()
    yield "aten.mul_.Tensor", "aten.neg.default"


def second_of_a_batch(streams: CheckedStreams, edge: bool) -> Case:
    weights, gradients = [torch.ones(4) for _ in range(2)], [torch.ones(4) for _ in range(2)]
    ready, one, other = [streams.so_far()], streams.open(), streams.open()
    ends = [stream.run(lambda g=g: g.div_(2), after=ready) for stream, g in zip((one, other), gradients, strict=True)]
    for end in ends[: 2 if edge else 1]:
        streams.join(end)
    torch._foreach_sub_(weights, gradients)
    yield "aten.div_.Tensor", "aten._foreach_sub_.List"


def update_before_the_work_that_reads(streams: CheckedStreams, edge: bool) -> Case:
    """A write that does not wait for a read."""
    weight, copied = torch.ones(4), torch.zeros(4)
    end = streams.open().run(lambda: copied.copy_(weight), after=[streams.so_far()])
    if edge:
        streams.join(end)
    weight.sub_(1)
    yield "aten.copy_.default", "aten.sub_.Tensor"


def collective_in_a_stream(streams: CheckedStreams, edge: bool) -> Case:
    gradient = torch.ones(4)
    stream = streams.open()
    end = stream.run(lambda: dist.all_reduce(gradient, async_op=True).wait(), after=[streams.so_far()])
    if edge:
        streams.join(end)
    gradient.neg()
    yield "c10d.allreduce_.default", "aten.neg.default"


def statistics_of_a_batch_norm(streams: CheckedStreams, edge: bool) -> Case:
    norm = torch.nn.BatchNorm1d(2)
    inputs, side = torch.ones(3, 2), streams.open()
    ready = streams.so_far()
    with streams.entered(side):
        streams.join(ready)
        norm(inputs)
        end = streams.so_far()
    if edge:
        streams.join(end)
    norm.running_mean.neg()
    yield "aten.native_batch_norm.default", "aten.neg.default"


EDGES = [
    ready_event, end_of_a_sum, end_of_a_copy_up, pinned_memory_used_again, read_by_the_host, read_by_an_operation_of_the_host,
    still_sent_by_the_host, freed_without_record_stream, freed_after_it_was_joined, second_side_stream, second_of_a_batch,
    update_before_the_work_that_reads, collective_in_a_stream, statistics_of_a_batch_norm,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@late_or_early
@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.__name__)
def test_each_missing_edge_is_found_with_both_places(case, late):
    streams = CheckedStreams(late)
    with watched(streams):
        kept = case(streams, edge=False)
        operations = next(kept)
    with pytest.raises(AssertionError) as raised:
        streams.check()
    assert streams.races
    for race in streams.races:
        # late work is noted when somebody waits for it
        assert {race.earlier.operation, race.later.operation} == set(operations)
        for access in (race.earlier, race.later):
            code, line = access.frames[0]
            assert code.co_filename == __file__
            assert line > case.__code__.co_firstlineno
            assert f"{access.timeline.name}, at {HERE}:{line}" in str(raised.value)
    kept.close()


@late_or_early
@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.__name__)
def test_nothing_is_found_where_the_edge_is_there(case, late):
    streams = CheckedStreams(late)
    with streams.watching():
        kept = case(streams, edge=True)
        next(kept)
    assert streams.races == []
    kept.close()


# -- against an explicit graph ---------------------------------------------------------------------------------

SLOTS, STREAMS = 2, 2


@dataclass(frozen=True)
class Command:
    """What the host does next; events are numbered as they are made."""

    kind: str  # "run", "use", "join", "synchronize", "so_far", "enter" or "leave"
    stream: int = 0
    slot: int = 0
    writes: bool = False
    events: tuple[int, ...] = ()


def program(seed: int, length: int) -> list[Command]:
    """Commands at random; of one seed, a shorter program is the beginning of a longer one."""
    random = Random(seed)
    commands: list[Command] = []
    events, entered = 0, False
    while len(commands) < length:
        kind = random.choice(
            ("run", "run", "use", "use", "so_far", "join", "join", "synchronize", "leave" if entered else "enter")
        )
        if kind in ("join", "synchronize") and not events:
            continue
        recent = range(max(0, events - 3), events)
        some = random.sample(recent, 1 if kind in ("join", "synchronize") else random.randrange(min(len(recent), 2) + 1))
        commands.append(Command(kind, random.randrange(STREAMS), random.randrange(SLOTS), random.random() < 0.5, tuple(some)))
        events += kind in ("run", "so_far")
        entered = (entered or kind == "enter") and kind != "leave"
    return commands


@dataclass
class Graph:
    """Nodes with those that are directly before them; a timeline is its last node."""

    before: list[set[int]] = field(default_factory=list)

    def add(self, *direct: int | None) -> int:
        nodes = {node for node in direct if node is not None}
        self.before.append(nodes.union(*(self.before[node] for node in nodes)))
        return len(self.before) - 1


def has_races(commands: list[Command]) -> bool:
    """Whether two uses of a slot, one of them a write, are in no order."""
    graph = Graph()
    host: int | None = None
    last: dict[int, int | None] = dict.fromkeys(range(-1, STREAMS))  # -1 is the script's
    current, events, uses = -1, [], []
    for command in commands:
        host = graph.add(host)
        if command.kind == "run":
            node = graph.add(host, last[command.stream], *(events[event] for event in command.events))
            last[command.stream] = node
            events.append(node)
            uses.append((node, command))
        elif command.kind == "use":
            last[current] = graph.add(host, last[current])
            uses.append((last[current], command))
        elif command.kind == "so_far":
            last[current] = graph.add(host, last[current])
            events.append(last[current])
        elif command.kind == "join":
            last[current] = graph.add(last[current], events[command.events[0]])
        elif command.kind == "synchronize":
            host = graph.add(host, events[command.events[0]])
        else:
            current = command.stream if command.kind == "enter" else -1
    return any(
        one.slot == other.slot and (one.writes or other.writes) and first not in graph.before[second]
        for place, (second, other) in enumerate(uses)
        for first, one in uses[:place]
    )


def carried_out(commands: list[Command], late: bool) -> list[Race]:
    memory = torch.zeros(8 * SLOTS)
    slots = [memory[8 * slot : 8 * slot + 8] for slot in range(SLOTS)]
    streams = CheckedStreams(late)
    workers = [streams.open() for _ in range(STREAMS)]
    events: list[CheckedEvent] = []

    def use(command: Command) -> Callable[[], object]:
        slot = slots[command.slot]
        return (lambda: slot.fill_(1)) if command.writes else (lambda: slot.sum())

    with watched(streams), contextlib.ExitStack() as entered:
        for command in commands:
            if command.kind == "run":
                after = [events[event] for event in command.events]
                events.append(workers[command.stream].run(use(command), after))
            elif command.kind == "use":
                use(command)()
            elif command.kind == "so_far":
                events.append(streams.so_far())
            elif command.kind == "join":
                streams.join(events[command.events[0]])
            elif command.kind == "synchronize":
                events[command.events[0]].synchronize()
            elif command.kind == "enter":
                entered.enter_context(streams.entered(workers[command.stream]))
            else:
                entered.close()
    return streams.races


@settings(max_examples=80, deadline=None)
@given(st.builds(program, st.integers(0, 2**32), st.integers(3, 24)))
def test_there_are_races_exactly_where_the_graph_has_them(commands):
    """Up to the command that brings the first race there is none, and with it there is."""
    ordered = next((end for end in range(len(commands)) if has_races(commands[: end + 1])), len(commands))
    for late in (True, False):
        assert carried_out(commands[:ordered], late) == []
        assert bool(carried_out(commands[: ordered + 1], late)) == (ordered < len(commands))


# -- streams and events ----------------------------------------------------------------------------------------


def test_late_streams_do_nothing_until_somebody_waits():
    streams = CheckedStreams(late=True)
    done: list[str] = []
    one, other = streams.open(), streams.open()
    first = one.run(lambda: done.append("first"))
    second = other.run(lambda: done.append("second"), after=[first])
    third = one.run(lambda: done.append("third"))
    assert done == []
    assert not any(event.query() for event in (first, second, third))
    streams.join(second)
    assert done == ["first", "second"]
    # the script's stream waits for it, and not the host
    assert not first.query()
    second.synchronize()
    assert first.query()
    assert not third.query()
    third.synchronize()
    assert done[2:] == ["third"]


def test_early_streams_do_all_at_once():
    streams = CheckedStreams(late=False)
    done: list[str] = []
    assert streams.open().run(lambda: done.append("done")).query()
    assert done == ["done"]
    assert streams.so_far().query()


def test_the_host_learns_of_a_late_scripts_stream_by_waiting_and_then_knows_all_before():
    streams = CheckedStreams(late=True)
    with streams.watching():
        data = torch.ones(2)
        one = streams.so_far()
        data.add_(1)
        two = streams.so_far()
        data.add_(1)
        three = streams.so_far()
        assert not one.query()
        assert not two.query()
        two.synchronize()
        assert one.query()
        assert not three.query()
    assert (streams.waits, streams.host_syncs) == (1, 1)


def test_a_query_that_says_yes_is_as_good_as_a_wait():
    streams = CheckedStreams(late=False)
    with streams.watching():
        data = torch.ones(2)
        end = streams.open().run(lambda: data.mul_(2), after=[streams.so_far()])
        assert end.query()
        data.add_(1)
    assert streams.waits == 0


def test_waits_of_the_training_thread_are_counted_and_those_of_other_threads_apart():
    streams = CheckedStreams(late=True)
    with streams.watching():
        reached, end = streams.so_far(), streams.open().run(lambda: None)

        def wait() -> None:
            reached.synchronize()
            end.synchronize()

        other = threading.Thread(target=wait)
        other.start()
        other.join()
        assert (streams.waits, streams.host_syncs) == (1, 0)
        end.synchronize()
        assert (streams.waits, streams.host_syncs) == (1, 1)


def test_operations_for_which_the_host_waits_are_counted_and_tell_it_what_is_over():
    streams = CheckedStreams(late=True)
    with streams.watching():
        data = torch.ones(2)
        end = streams.open().run(lambda: data.mul_(2), after=[streams.so_far()])
        streams.join(end)
        reached = streams.so_far()
        assert not reached.query()
        assert data.sum().item() == 4
        assert reached.query()
        pinned = streams.host_memory(data)
        pinned.copy_(data, non_blocking=True)
        assert streams.implicit_syncs == 1
        pinned.copy_(data)
        assert streams.implicit_syncs == 2
        assert pinned.sum().item() == 4  # of the host
        step = torch.tensor(0.0)  # so is a number
        step += 1
        assert step.item() == 1
        assert streams.implicit_syncs == 2


def test_streams_are_equal_to_themselves_and_the_current_one_is_that_of_the_thread():
    streams = CheckedStreams(late=True)
    script, side = streams.scripts(), streams.open(urgent=True)
    assert side != script
    with streams.entered(side):
        assert streams.scripts() == side
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(streams.scripts()))
        thread.start()
        thread.join()
        assert seen == [script]
    assert streams.scripts() == script
    inside: list[object] = []
    side.run(lambda: inside.append(streams.scripts())).synchronize()
    assert inside == [side]


@pytest.mark.parametrize("orders", [True, False])
def test_whether_collectives_run_in_streams_is_as_was_told(orders):
    assert CheckedStreams(late=True, orders=orders).orders(dist.group.WORLD) == orders


def test_what_work_raises_gets_to_whoever_waits_and_the_next_work_still_runs():
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    stream = CheckedStreams(late=True).open()
    failed, next_one = stream.run(fail), stream.run(lambda: done.append("next"))
    next_one.synchronize()
    assert done == ["next"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            failed.synchronize()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        CheckedStreams(late=False).open().run(fail)


@late_or_early
def test_threads_that_wait_for_each_others_streams_get_there(late):
    """Each takes the turns of one stream, whose work waits for what the other's has done."""
    streams = CheckedStreams(late)
    pair = [streams.open(), streams.open()]
    counts = [0, 0]
    ends: list[CheckedEvent] = []

    def add(place: int) -> None:
        counts[place] += 1

    for turn in range(200):
        ends.append(pair[turn % 2].run(lambda turn=turn: add(turn % 2), after=ends[-1:]))
    threads = [threading.Thread(target=lambda mine=ends[place::2]: [end.synchronize() for end in mine]) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [100, 100]


def test_work_is_watched_on_whatever_thread_it_runs():
    streams = CheckedStreams(late=True)
    side = streams.open()

    def other() -> None:
        with streams.entered(side):
            streams.join(end)

    with watched(streams):
        data = torch.ones(2)
        end = streams.open().run(lambda: data.mul_(2), after=[streams.so_far()])
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        data.add_(1)
    (race,) = streams.races
    assert (race.earlier.operation, race.later.operation) == ("aten.mul_.Tensor", "aten.add_.Tensor")


def test_deferred_updates_are_watched_although_they_leave_other_modes():
    streams = CheckedStreams(late=False)
    data = torch.ones(2)
    with watched(streams):
        streams.open().run(lambda: data.mul_(2))
        with as_at_step():
            data.add_(1)
    (race,) = streams.races
    assert (race.earlier.operation, race.later.operation) == ("aten.mul_.Tensor", "aten.add_.Tensor")


def test_a_training_step_is_watched_from_forward_to_update():
    """The backward pass and a fused update too: work that nothing orders with them races with both."""
    for update, reads in (
        ({"foreach": True}, "aten._foreach_lerp_"),
        ({"fused": True}, "aten._fused_adam_"),
        ({}, "aten.lerp_"),
    ):
        streams = CheckedStreams(late=False)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(net.parameters(), **update)
        stream = streams.open()
        with watched(streams):
            for _ in range(2):
                net(torch.ones(3, 4)).sum().backward()
                stream.run(lambda net=net: [param.grad.div_(2) for param in net.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        script = "the script's stream"
        assert any(
            race.earlier.timeline.name == script and race.later.operation == "aten.div_.Tensor" for race in streams.races
        )
        assert any(race.later.timeline.name == script and race.later.operation.startswith(reads) for race in streams.races)


@late_or_early
def test_neighbours_in_one_buffer_do_not_race_and_views_of_one_range_do(late):
    streams = CheckedStreams(late)
    flat = torch.zeros(8)
    with streams.watching():
        stream = streams.open()
        stream.run(lambda: flat[:4].view(2, 2).t().fill_(1))
        flat[4:].fill_(1)
        flat[4:].expand(2, 4).sum()
        torch.empty_like(flat)  # only its shape
        flat.reshape(2, 4)
    with watched(streams):
        flat.view(4, 2)[1:2].add_(1)
    (race,) = streams.races
    assert (race.begin, race.end) == (8, 16)


def test_races_of_the_same_two_places_are_told_once_and_all_others_are_counted():
    streams = CheckedStreams(late=False)
    stream, data = streams.open(), torch.zeros(4)
    with watched(streams):
        for _ in range(5):
            stream.run(lambda: data.add_(1), after=[streams.so_far()])
            data.mul_(2)
    assert len(streams.races) == 1
    with watched(streams):
        for number in range(30):
            exec(f"streams.open().run(lambda: data.add_({number}))", {"streams": streams, "data": data})
    with pytest.raises(AssertionError, match=r"(?s)^3\d uses .*and 1\d more"):
        streams.check()
