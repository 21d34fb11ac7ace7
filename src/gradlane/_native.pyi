"""Types of the C++ module; what each call means stands in native/node/node.h, native/net/heartbeat.h and
native/schedule/dispatcher.h.
"""

from collections.abc import Sequence

class Schedule:
    def __init__(
        self,
        tensors: int,
        messages: list[tuple[int, int, int, bool, list[int]]],
        windows: list[int | None],
        sequence: list[int] | None,
        second_phases: list[int],
        follow: bool,
    ) -> None: ...

class Dispatcher:
    def __init__(self, schedule: Schedule, /) -> None: ...
    def begin(self) -> bool: ...
    def ready(self, tensor: int, /) -> list[int]: ...
    def finished(self, message: int, /) -> list[int]: ...
    def allow(self, message: int, /) -> list[int]: ...
    def done(self) -> bool: ...
    def state(self) -> tuple[int, list[int], list[int]]: ...
    def is_in_second_phase(self, message: int, /) -> bool: ...

class Engine:
    def has_arrived(self, tensor: int, /) -> bool: ...
    def all_arrived(self) -> bool: ...
    def interruptions(self) -> int: ...
    def interrupt(self) -> None: ...
    def wait(self, node: Node, tensor: int, interruptions: int, timeout_ms: int, /) -> bool: ...

class Heartbeat:
    def __init__(self, beat: bytes, interval_ms: int, /) -> None: ...
    def add(self, fd: int, /) -> None: ...
    def send(self, fd: int, frame: bytes, /) -> None: ...
    def remove(self, fd: int, /) -> None: ...
    def lives(self) -> None: ...
    def close(self) -> None: ...

class Node:
    def port(self) -> int: ...
    def dial(self, server: int, address: str, port: int, /) -> None: ...
    def join(self, timeout_ms: int, /) -> tuple[bool, str]: ...
    def define(
        self,
        tensor: int,
        from_address: int,
        into_address: int,
        size_bytes: int,
        dtype: int,
        op: int = 0,
        sender: int = -1,
        receiver: int = -1,
        at: int = -1,
        whole: bool = False,
        urgent_first: bool = False,
        priority: int = 0,
        lane: int = 0,
        update: int = 0,
        staleness: int = 0,
        group: int = 0,
    ) -> None: ...
    def push(self, tensor: int, notify: bool = True, notify_sent: bool = False, flags: int = 0, held: bool = False) -> None: ...
    def release(self, tensor: int, /) -> None: ...
    def set_rule(
        self,
        group: int,
        kind: int,
        *,
        lr: float,
        weight_decay: float = 0,
        momentum: float = 0,
        dampening: float = 0,
        beta1: float = 0,
        beta2: float = 0,
        epsilon: float = 0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None: ...
    def start(
        self,
        tensor: int,
        from_address: int,
        into_address: int,
        size_bytes: int,
        dtype: int,
        op: int = 0,
        sender: int = -1,
        receiver: int = -1,
        at: int = -1,
        urgent_first: bool = False,
        priority: int = 0,
        notify: bool = False,
    ) -> None: ...
    def forget_below(self, tensor: int, /) -> None: ...
    def carry_out(
        self,
        schedule: Schedule,
        carried: list[list[int]],
        memory: list[tuple[int, list[tuple[int, int, int]]]],
        first: int,
        forwards: bool,
        keeps_log: bool,
    ) -> Engine: ...
    def begin(self, iteration: int, /) -> None: ...
    def ready(self, tensors: Sequence[int], /) -> int: ...
    def flush(self) -> None: ...
    def spans(self, last: bool, /) -> list[tuple[str, int, int, int, int]]: ...
    def facts(self) -> list[tuple[str, int, list[int]]]: ...
    def plan_state(self) -> tuple[int, list[int], list[int]]: ...
    def wait(self, tensor: int, timeout_ms: int, /) -> bool: ...
    def is_done(self, tensor: int, /) -> bool: ...
    def take(self, timeout_ms: int, /) -> list[int]: ...
    def await_goodbyes(self, timeout_ms: int, /) -> bool: ...
    def abort(self, text: str, /) -> None: ...
    def failure(self) -> tuple[int, int, int, str]: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

def start_node(
    *,
    rank: int,
    server: int,
    world: int,
    servers: int,
    job: int,
    generation: int,
    fingerprint: bytes,
    secret: bytes,
    address: str,
    port: int,
    packet_bytes: int,
    rank_order: bool,
    checksum: bool,
    deal_evenly: bool,
    tell_tables: bool,
    marks: list[tuple[int, int]],
    unsent_bytes: int,
    send_buffer_bytes: int,
    congestion: str,
    ping_ms: int,
    dead_ms: int,
    linger_ms: int,
    max_bytes: int,
) -> Node: ...
def encode_header(
    *,
    type: int,
    flags: int,
    tensor: int,
    offset: int,
    length: int,
    iteration: int,
    priority: int,
    sender: int,
    payload_crc: int,
) -> bytes: ...
def crc32c(data: bytes, /) -> int: ...
def isa() -> str: ...
