"""Models described by data: a file of `data/models` is a model, as the list of its modules.

A step is an operation of `Net` with its arguments, in the order of the forward pass. `repeat` has steps of its own. In
their names {0} is the number of the outermost repetition, {1} of the next. `shape` states the shape of what follows,
where branches meet or part.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import msgspec

from gradlane.core.fields import need
from gradlane.zoo.layers import Net

OPERATIONS = (
    "conv", "norm", "relu", "pool", "average", "flatten", "linear", "layer_norm", "embedding", "parameter", "attend",
    "tied_linear",
)  # fmt: skip
_NAMED = ("conv", "norm", "linear", "layer_norm", "embedding", "parameter")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation, or steps that are repeated.

    Attributes:
        op: one of `OPERATIONS`, "shape" or "repeat".
        name: of the module, where the operation has parameters.
        args: of the operation: those of `Net`'s method by name; of "shape" its `shape`.
        times, steps: of "repeat".
    """

    op: str
    name: str = ""
    args: dict[str, Any] = {}
    times: int = 1
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        need(self.op in (*OPERATIONS, "shape", "repeat"), "op", self.op, f"shape, repeat or one of {', '.join(OPERATIONS)}")
        need(bool(self.name) == (self.op in _NAMED), "name", self.name, f"a name for {', '.join(_NAMED)}, none for others")
        need((self.op == "repeat") == bool(self.steps), "steps", len(self.steps), "steps for repeat, none for others")


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model as its list of modules.

    Attributes:
        title: for people.
        reference: the definition that it has the tensors of, and their published number.
        batch, device: the defaults of its profile.
        input: the shape of a sample.
        steps: the forward pass.
    """

    title: str
    reference: str
    batch: int
    device: str
    input: tuple[int, ...]
    steps: tuple[Step, ...]

    def build(self) -> Net:
        """The network that the steps make."""
        net = Net(*self.input)
        _take(net, self.steps, ())
        return net


def _take(net: Net, steps: tuple[Step, ...], numbers: tuple[int, ...]) -> None:
    for step in steps:
        if step.op == "repeat":
            for number in range(step.times):
                _take(net, step.steps, (*numbers, number))
        elif step.op == "shape":
            net.shape = tuple(step.args["shape"])
        else:
            # JSON has lists where `Net` takes tuples
            args = {key: tuple(value) if isinstance(value, list) else value for key, value in step.args.items()}
            getattr(net, step.op)(*([step.name.format(*numbers)] if step.name else []), **args)


def descriptions() -> dict[str, Description]:
    """All models of `data/models`, by name."""
    files = sorted(resources.files("gradlane.zoo").joinpath("data/models").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".json"): msgspec.json.decode(file.read_bytes(), type=Description) for file in files}
