"""Tuned: the best knobs found for one policy on one job, and the trials that found them."""

from __future__ import annotations

from statistics import median

import msgspec

from gradlane.core.fields import MAX_BYTES, MAX_NS, need_int, need_name


class KnobTrial(msgspec.Struct, frozen=True):
    """Some iterations with the same knobs.

    Attributes:
        knobs: the values in force.
        times_ns: the measured iterations' times, in order.
        cut: whether the trial was stopped early because it was clearly slower.
    """

    knobs: dict[str, int]
    times_ns: tuple[int, ...]
    cut: bool = False

    def __post_init__(self) -> None:
        for name, value in self.knobs.items():
            need_name("knobs", name)
            need_int(f"knobs[{name!r}]", value, 0, MAX_BYTES)
        need_int("times_ns: their number", len(self.times_ns), 1, 1_000_000)
        for time_ns in self.times_ns:
            need_int("times_ns", time_ns, 0, MAX_NS)

    @property
    def iteration_ns(self) -> int:
        """The median iteration time, in ns."""
        return round(median(self.times_ns))


class Tuned(msgspec.Struct, frozen=True):
    """What a tuning run found.

    Attributes:
        policy, knobs: the policy and its best knobs.
        model: the model's name.
        tensors: digest of the model's tensors, by which a job recognizes its own file.
        workers, backend: the job it was tuned on.
        trials: all trials, in order.
    """

    policy: str
    knobs: dict[str, int]
    model: str
    tensors: str
    workers: int
    backend: str
    trials: tuple[KnobTrial, ...] = ()

    def __post_init__(self) -> None:
        for field in ("policy", "model", "tensors", "backend"):
            need_name(field, getattr(self, field))
        for name, value in self.knobs.items():
            need_int(f"knobs[{name!r}]", value, 0, MAX_BYTES)
        need_int("workers", self.workers, 1, 1_000_000)
