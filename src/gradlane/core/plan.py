"""Plan: a communication schedule as data.

A plan says in which messages the gradient bytes of one iteration travel, how urgent each is, and on which lane. It
also says how many bytes a lane may have unfinished, and whether the next forward pass may begin before everything has
arrived. Once it was planned ahead, it has the order in which the messages start. It is frozen and has a fingerprint:
two ranks with equal fingerprints do the same.

Constructors refuse what no profile allows; `core.checks.check_plan` checks a plan against a
profile.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from gradlane.core.backends import BackendName
from gradlane.core.fields import MAX_BYTES, MAX_MESSAGES, MAX_TENSORS, need, need_int, need_name
from gradlane.core.profile import TensorSpec
from gradlane.units import counted, format_bytes

MAX_PRIORITY = 2**31 - 1
MAX_LANES = 64
MAX_RANKS = 1 << 16


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A byte range of one tensor's gradient.

    Attributes:
        tensor: index into `Plan.tensors`.
        offset_bytes, size_bytes: the range.
    """

    tensor: int
    offset_bytes: int
    size_bytes: int

    def __post_init__(self) -> None:
        need_int("tensor", self.tensor, 0, MAX_TENSORS)
        need_int("offset_bytes", self.offset_bytes, 0, MAX_BYTES)
        need_int("size_bytes", self.size_bytes, 1, MAX_BYTES)


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One or more slices, started and finished as one operation.

    Attributes:
        slices: what the message carries.
        priority: 0 is the most urgent.
        lane: index into `Plan.lanes`.
        hold_until: a tensor that must be ready before the message may start, though the message
            carries none of its bytes (Prophet's blocks).
        two_phase: the sum travels as two operations (DeAR). Over all-reduce: a reduce-scatter when
            the message is ready and an all-gather, by priority, once every message of the plan has
            been reduced. Over servers: a push, and a pull that the worker asks for.
    """

    slices: tuple[Slice, ...]
    priority: int = 0
    lane: int = 0
    hold_until: int | None = None
    two_phase: bool = msgspec.field(default=False, name="split")

    def __post_init__(self) -> None:
        need(0 < len(self.slices) <= MAX_TENSORS, "slices", len(self.slices), "1 or more slices")
        need_int("priority", self.priority, 0, MAX_PRIORITY)
        need_int("lane", self.lane, 0, MAX_LANES - 1)
        if self.hold_until is not None:
            need_int("hold_until", self.hold_until, 0, MAX_TENSORS)

    @property
    def size_bytes(self) -> int:
        """Bytes of all slices together."""
        return sum(piece.size_bytes for piece in self.slices)

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensor of each slice, as indices into `Plan.tensors`."""
        return tuple(piece.tensor for piece in self.slices)


class Lane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A queue of messages with a window.

    Attributes:
        window_bytes: how many bytes the lane may have unfinished (None: no limit). A message larger
            than the window may go alone.
        network_priority: the priority class of the lane's packets, 0 (highest) to 7.
        acknowledged: over servers a message is finished when they have all of it and have said so, or when its sum is
            back (ByteScheduler §4.2). UNSET, and left out of files: when its last byte has left the sender.
    """

    window_bytes: int | None = None
    network_priority: int = 0
    acknowledged: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.window_bytes is not None:
            need_int("window_bytes", self.window_bytes, 1, MAX_BYTES)
        need_int("network_priority", self.network_priority, 0, 7)

    def network_class(self, classes: int) -> int:
        """The class in which a network that serves `classes` of them (1 or more) has this lane: its own, or the last."""
        return min(self.network_priority, classes - 1)


class Ownership(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rank has the whole sum of each tensor once all first phases have ended.

    The owner computes the norm of each of its sums and sends it to all ranks. A script that clips gradients by their
    norm waits for the first phases only. Each sum is scaled when its second phase has ended. A message of one phase
    brings its sums to all ranks at once; the owners of its tensors send their norms too.

    Attributes:
        ranks: for each tensor of the plan its owner.
        order: of the norms, 1 to 64; 0 stands for infinity, whose norm is the largest absolute value.
    """

    ranks: tuple[int, ...]
    order: int = 2

    def __post_init__(self) -> None:
        for rank in self.ranks:
            need_int("owners.ranks", rank, 0, MAX_RANKS - 1)
        need_int("owners.order", self.order, 0, 64)

    @property
    def norm(self) -> float:
        """The order as torch has it."""
        return self.order or math.inf


Wire = Literal["fifo", "pull-priority", "packet-fifo", "packet-priority"]
"""The values of `Plan.wire`."""
WIRES: tuple[Wire, ...] = get_args(Wire)


def returns_whole(wire: Wire) -> bool:
    """Whether a server returns all that it has of a message at once, rather than each packet as soon as it is summed."""
    return wire in ("fifo", "pull-priority")


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The schedule of one iteration.

    Attributes:
        policy, model: names, for people.
        tensors: the model's gradient tensors, in order of readiness.
        messages: in which messages their bytes travel.
        lanes: the queues that messages name by index.
        wire: how the transport treats messages. "fifo": it sends each whole, and a server returns
            it whole, first in, first out. "pull-priority": as "fifo", and a server returns the most urgent
            of its sums first. "packet-fifo": it cuts messages into packets, and a server returns each packet
            as soon as it is summed. "packet-priority": as "packet-fifo", and the most urgent packet goes
            first, whenever it came.
        crosses_barrier: whether each layer of the next forward pass may run as soon as its own
            parameters are updated. If not, the pass begins when all are.
        sequence: None, or all messages in the order in which they start within each lane, each as
            soon as it is ready and its window has room. Collectives need it, as every rank must
            issue them in one order. With owners it may have two-phase messages twice: such a second phase
            starts in that place, and does not wait for all first ones.
        backend: what carries the plan, where a session has more than one backend to choose from.
            UNSET, and left out of files and the fingerprint: whatever the session has.
        owners: UNSET, or the owner of each tensor. A two-phase message has whole tensors then, in the order of their
            owners, and its first phase brings each owner the sums of its tensors.
    """

    policy: str
    model: str
    tensors: tuple[TensorSpec, ...]
    messages: tuple[Message, ...]
    lanes: tuple[Lane, ...] = (Lane(),)
    wire: Wire = "fifo"
    crosses_barrier: bool = False
    sequence: tuple[int, ...] | None = None
    backend: BackendName | UnsetType = UNSET
    owners: Ownership | UnsetType = UNSET

    def __post_init__(self) -> None:
        need_name("policy", self.policy)
        need_name("model", self.model)
        need(self.wire in WIRES, "wire", self.wire, ", ".join(WIRES))
        need(0 < len(self.tensors) <= MAX_TENSORS, "tensors", len(self.tensors), f"1 to {MAX_TENSORS} of them")
        need(0 < len(self.messages) <= MAX_MESSAGES, "messages", len(self.messages), f"1 to {MAX_MESSAGES} of them")
        need(0 < len(self.lanes) <= MAX_LANES, "lanes", len(self.lanes), f"1 to {MAX_LANES} of them")
        # texts are made only where there is a fault: a plan may have a hundred thousand messages
        for index, message in enumerate(self.messages):
            if message.lane >= len(self.lanes):
                need(False, f"messages[{index}].lane", message.lane, f"below {len(self.lanes)}")
            held = message.hold_until
            if held is not None and held >= len(self.tensors):
                need(False, f"messages[{index}].hold_until", held, f"below {len(self.tensors)}")
        if self.sequence is not None:
            early = self.early_second_phases
            missing = set(range(len(self.messages))).difference(self.sequence)
            if (
                missing
                or len(self.sequence) != len(self.messages) + len(set(early))
                or max(self.sequence) >= len(self.messages)
            ):
                got = f"{len(self.sequence)} entries" + (f" without message {min(missing)}" if missing else "")
                need(False, "sequence", got, f"each of the {len(self.messages)} messages once")
            for index in early:
                has_two = self.owners is not UNSET and self.messages[index].two_phase
                need(has_two, "sequence", f"message {index} twice", "it once: it has no second phase with a place of its own")
            need(self.sequence[-1] not in early, "sequence", f"message {self.sequence[-1]} last", "a first phase at the end")
        if self.owners is not UNSET:
            self._check_owners(self.owners.ranks)

    def _check_owners(self, owner_of: tuple[int, ...]) -> None:
        need(len(owner_of) == len(self.tensors), "owners.ranks", f"{len(owner_of)} of them", f"{len(self.tensors)}")
        for index, message in enumerate(self.messages):
            if not message.two_phase:
                continue
            for piece in message.slices:
                need(piece.tensor < len(self.tensors), f"messages[{index}]", piece.tensor, f"below {len(self.tensors)}")
                size_bytes = self.tensors[piece.tensor].size_bytes
                need(
                    piece.size_bytes == size_bytes,
                    f"messages[{index}]",
                    piece.size_bytes,
                    f"a whole tensor, {size_bytes} bytes",
                )
            owners = [owner_of[tensor] for tensor in message.tensors]
            need(owners == sorted(owners), f"messages[{index}]", owners, "tensors in the order of their owners")

    def tells_norms(self, order: float | None) -> bool:
        """Whether owners tell the norms of this order, before the sums have arrived."""
        return self.owners is not UNSET and self.owners.norm == order

    def sum_bytes(self, index: int, ranks: int) -> int:
        """The size of an all-reduce among `ranks` that takes as long as message `index`: its own, unless owners share
        it unevenly, whose largest part sets the pace.
        """
        message = self.messages[index]
        if self.owners is UNSET or not message.two_phase:
            return message.size_bytes
        parts: dict[int, int] = {}
        for piece in message.slices:
            owner = self.owners.ranks[piece.tensor]
            parts[owner] = parts.get(owner, 0) + piece.size_bytes
        return max(message.size_bytes, ranks * max(parts.values()))

    @property
    def fingerprint(self) -> str:
        """Hash of everything in the plan, 16 hexadecimal digits; ranks with equal fingerprints do
        the same.
        """
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]

    @property
    def size_bytes(self) -> int:
        """Bytes of all messages together."""
        return sum(message.size_bytes for message in self.messages)

    @property
    def tensors_by_message(self) -> list[list[int]]:
        """For each message the tensors that it carries bytes of, each once."""
        return [sorted(set(message.tensors)) for message in self.messages]

    @property
    def messages_by_tensor(self) -> list[list[int]]:
        """For each tensor the messages that carry bytes of it, each once."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for index, tensors in enumerate(self.tensors_by_message):
            for tensor in tensors:
                found[tensor].append(index)
        return found

    @property
    def second_phases(self) -> tuple[int, ...]:
        """The two-phase messages, in the order in which their second phases start."""
        two_phase = (index for index, message in enumerate(self.messages) if message.two_phase)
        by_priority = tuple(sorted(two_phase, key=lambda index: (self.messages[index].priority, index)))
        early = self.early_second_phases
        return (*early, *(index for index in by_priority if index not in early)) if early else by_priority

    @property
    def early_second_phases(self) -> tuple[int, ...]:
        """Those of `second_phases` that have a place in the sequence, before the last first phase."""
        if self.sequence is None or len(self.sequence) == len(self.messages):
            return ()
        return tuple(index for index, is_second in self.starts if is_second)

    @property
    def late_second_phases(self) -> tuple[int, ...]:
        """Those of `second_phases` that start when all first phases have ended."""
        return self.second_phases[len(self.early_second_phases) :]

    @property
    def starts(self) -> tuple[tuple[int, bool], ...]:
        """The sequence, if there is one: each message, and whether it is its second phase."""
        seen: set[int] = set()
        starts = []
        for index in self.sequence or ():
            starts.append((index, index in seen))
            seen.add(index)
        return tuple(starts)

    def acknowledges(self, message: Message) -> bool:
        """Whether servers say that they have `message`, one of this plan's."""
        return bool(self.lanes[message.lane].acknowledged)

    @property
    def is_acknowledged(self) -> bool:
        """Whether servers say of messages of a lane that they have them."""
        return any(lane.acknowledged for lane in self.lanes)

    @property
    def has_windows(self) -> bool:
        """Whether a lane has a window, so that a message may wait for the end of another."""
        return any(lane.window_bytes is not None for lane in self.lanes)

    def with_sequence(self, sequence: tuple[int, ...]) -> Plan:
        """The same plan with the order of its messages fixed."""
        return msgspec.structs.replace(self, sequence=sequence)

    def describe(self, limit: int = 20) -> str:
        """The plan for people: a headline, then one line for each of the first `limit` messages."""
        windows = ["without limit" if lane.window_bytes is None else format_bytes(lane.window_bytes) for lane in self.lanes]
        window = f"window {windows[0]}" if len(windows) == 1 else f"windows of {len(windows)} lanes {', '.join(windows)}"
        barrier = "crosses the barrier" if self.crosses_barrier else "waits for all before the next forward pass"
        over = "" if self.backend is UNSET else f" over {self.backend}"
        acknowledged = " until acknowledged" if self.is_acknowledged else ""
        lines = [
            f"{self.policy} for {self.model}{over}: {counted(len(self.messages), 'messages')}, "
            f"{format_bytes(self.size_bytes)}, {window}{acknowledged}, {barrier}, fingerprint {self.fingerprint}"
        ]
        starts = self.starts or [(index, False) for index in range(len(self.messages))]
        for place, (index, is_second) in enumerate(starts):
            if place == limit:
                lines.append(f"  ... and {len(starts) - limit} more")
                break
            lines.append(f"  {place:4d}  {'second phase of ' if is_second else ''}{self.describe_message(index)}")
        return "\n".join(lines)

    def describe_message(self, index: int) -> str:
        """One message for people: index, priority, size and what it carries."""
        message = self.messages[index]
        first = message.slices[0]
        spec = self.tensors[first.tensor]
        what = spec.name
        if first.size_bytes != spec.size_bytes:
            what += f"[{first.offset_bytes}:{first.offset_bytes + first.size_bytes}]"
        if len(message.slices) > 1:
            what += f" .. {self.tensors[message.slices[-1].tensor].name} ({len(message.slices)} slices)"
        return f"message {index}, priority {message.priority}, {format_bytes(message.size_bytes)}: {what}"
