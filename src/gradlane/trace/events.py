"""Events of PyTorch profiler traces, as Chrome's format has them."""

from __future__ import annotations

import msgspec

ACCUMULATE = "torch::autograd::AccumulateGrad"
OPTIMIZER_STEP = "Optimizer.step"
MARK = "autograd::engine::evaluate_function"
"""Of a backward operation, in the names of events."""
DTYPES = {"float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}
"""Of gradients, by their names in C++."""
KERNELS = {"Kernel", "kernel"}
_RUNTIMES = ("Runtime", "_runtime", "_driver")
_OPERATORS = {"Operator", "cpu_op", ""}
_COLLECTIVES = "nccl"


class Args(msgspec.Struct):
    correlation: int = -1  # joins a launch to its kernel
    sequence: int = msgspec.field(default=-1, name="Sequence number")  # joins a forward operation to its backward
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")  # 0 except in backward
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b'["float"]'), name="Input type")

    @property
    def has_no_gradient(self) -> bool:
        """Of AccumulateGrad: whether autograd came to a parameter without a gradient for it."""
        if len(self.shapes) > 100 or len(self.types) > 100:
            return False
        return b"".join(bytes(self.shapes).split()) == b"[[]]" and b"".join(bytes(self.types).split()) == b'[""]'


class Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str | None = None
    pid: int | str | None = None
    args: Args = msgspec.field(default_factory=Args)

    @property
    def end(self) -> float:
        return self.ts + self.dur

    @property
    def is_work_of_the_host(self) -> bool:
        """Whether it is an operation or a call of the runtime, and no mark of a step, a module or of waiting."""
        return self.calls_the_runtime or (self.cat in _OPERATORS and "::" in self.name)

    @property
    def calls_the_runtime(self) -> bool:
        """Whether it is a call of a device's runtime or driver, which may launch work."""
        return self.cat.endswith(_RUNTIMES)

    @property
    def is_collective(self) -> bool:
        """Whether it is a kernel of a collective."""
        return self.cat in KERNELS and self.name.startswith(_COLLECTIVES)
