"""Program: a training loop as data. What each rank does follows from the program and the rank's number alone.

Everything in it is a line of words, so that a program is read, compared, printed and stored as what it is:

    {"model": "mlp", "optimizer": "adam", "way": "bytescheduler late", "hooks": ["after step_post clamp"],
     "steps": [["zero_grad", "backward", "clip 0.1", "step"], ["backward no_sync", "backward", "step", "see model"]]}

An action is a name of `ACTIONS` and its words; `left|right` in it means `left` on rank 0 and `right` on rank 1, and a last
word `@1` means on rank 1 only. A hook is registered `before` or `after` gradlane (or DDP) gets the model.
"""

from __future__ import annotations

import msgspec
from msgspec import structs


class Program(msgspec.Struct, frozen=True):
    """A training loop.

    model, optimizer: names in `MODELS` and `OPTIMIZERS`. way: how gradlane is to run it, a line of `WAYS`. hooks: what is
    registered at the start. steps: the actions of each step, in order.
    """

    steps: tuple[tuple[str, ...], ...]
    model: str = "mlp"
    optimizer: str = "momentum"
    way: str = "bytescheduler late"
    hooks: tuple[str, ...] = ()

    @property
    def plain_way(self) -> str:
        """The simplest of the ways that its own is one of."""
        return "mercury late served" if "served" in self.way.split() else "bytescheduler late"

    def kinds(self) -> dict[str, Program]:
        """What makes it differ from the simplest loop, by name, each with the program that is without it."""
        found: dict[str, Program] = {}
        for name, usual in (("model", "mlp"), ("optimizer", "momentum"), ("way", self.plain_way)):
            if getattr(self, name) != usual:
                found[f"{name} {getattr(self, name)}"] = structs.replace(self, **{name: usual})
        for hook in self.hooks:
            found[f"hook {hook}"] = structs.replace(self, hooks=tuple(one for one in self.hooks if one != hook))
        for kind in sorted({kind for step in self.steps for kind in _kinds_of(step)}):
            found[kind] = structs.replace(self, steps=tuple(_without(step, kind) for step in self.steps))
        return found

    def items(self) -> list[str]:
        """Every line that it consists of, hooks without the word that says when."""
        named = [f"model {self.model}", f"optimizer {self.optimizer}", f"way {self.way}"]
        return named + [hook.partition(" ")[2] for hook in self.hooks] + [line for step in self.steps for line in step]

    def json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> Program:
        return msgspec.json.decode(text, type=Program)


# -- what is unusual about a step ------------------------------------------------------------------------------

WHICH = ("all", "first", "last", "even", "odd")
"""Words that say which parameters."""


def kind_of(line: str) -> str:
    """An action without the words that say where it is done: on which parameters, on which rank, in which parts."""
    name, *words = line.split()
    return " ".join([name, *(word for word in words if word not in WHICH and not word.startswith("@"))])


def _kinds_of(step: tuple[str, ...]) -> set[str]:
    found = set()
    for line in step:
        if line.startswith("backward "):
            found |= {_flag(word) for word in line.split()[1:]}
        elif line not in ("backward", "step", "zero_grad"):
            found.add(kind_of(line))
    if "zero_grad" not in {line.split()[0] for line in step}:
        found.add("no zero_grad")
    if step.count("step") != 1:
        found.add("step twice" if "step" in step else "no step")
    if sum(line.startswith("backward") for line in step) > 1:
        found.add("several passes")
    return found


def _flag(word: str) -> str:
    """A word of `backward`: its flags are plain words in strategies.FLAGS; parts may hold commas and bars."""
    return "parts that differ" if "|" in word else word


def _without(step: tuple[str, ...], kind: str) -> tuple[str, ...]:
    if kind == "no zero_grad":
        return step if "zero_grad" in {line.split()[0] for line in step} else ("zero_grad", *step)
    if kind == "no step":
        return step if "step" in step else (*step, "step")
    if kind == "step twice":
        first = step.index("step") if "step" in step else 0
        return tuple(line for index, line in enumerate(step) if line != "step" or index == first)
    if kind == "several passes":
        last = max((index for index, line in enumerate(step) if line.startswith("backward")), default=0)
        return tuple(line for index, line in enumerate(step) if not line.startswith("backward") or index == last)
    found = []
    for line in step:
        if line.startswith("backward "):
            line = " ".join(word for word in line.split() if _flag(word) != kind)
        if kind_of(line) != kind:
            found.append(line)
        elif line.startswith("zero_grad"):
            found.append("zero_grad")
        elif line.startswith(("surgery", "sam")):
            found.append("backward")
        elif line.startswith("closure"):
            found += ["backward", "step"]
    return tuple(found)


def matches(item: str, words: str) -> bool:
    """Whether `item` begins with `words`, or has one of its own words of that name: `no_sync` matches `backward no_sync`."""
    return item == words or item.startswith(words + " ") or words in item.split()
