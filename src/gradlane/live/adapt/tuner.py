"""Tuner: tries other values of a policy's knobs while the session trains (ByteScheduler, SOSP '19,
section 4.3).

Rank 0 decides and broadcasts each new plan, whose fingerprint all ranks compare. Only rank 0's
iteration times count: ranks wait for one another's gradients, so that their iterations take equally
long.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec

from gradlane.core import files
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import TensorSpec
from gradlane.core.records.tuned import Tuned
from gradlane.errors import InputError
from gradlane.live.adapt.decisions import ControlDecision
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.planning import search
from gradlane.planning.search import Space
from gradlane.planning.search.gaussian import require_scikit_learn
from gradlane.planning.search.space import with_knobs
from gradlane.planning.tuning import TuneOptions, Tuning

log = logging.getLogger("gradlane")

# values of each knob that rank 0 simulates at the start, while the others wait: seconds at most
_PRIOR_STEPS = 5


class Tuner:
    """A `PlanController` that searches a policy's knobs, and ends when the search does.

    Args:
        space: the policy and the ranges of its knobs.
        options: how to search and for how long.
        rank: of this process.
        about: the record to complete: policy, model and workers, without knobs and trials.
        file: where rank 0 writes the record when the search has ended; None for nowhere.
    """

    def __init__(self, space: Space, options: TuneOptions, rank: int, about: Tuned, file: Path | None) -> None:
        self.over = False
        self._space, self._options = space, options
        self._rank, self._about, self._file = rank, about, file
        self._tuning: Tuning | None = None
        self._since_ns = 0

    def start(self, planner: Planner, recorder: Recorder) -> None:
        """Start the search. For the default one, rank 0 simulates some knobs first, as its prior."""
        if self._rank == 0:
            options, prior = self._options, None
            if options.search == search.DEFAULT:
                prior = search.predicted(self._space, planner.simulated_ns, _PRIOR_STEPS)
            searching = search.start(options.search, self._space.dimensions, options.seed, prior)
            self._tuning = Tuning(
                self._space, searching, options, lambda knobs: planner.fingerprint_of(with_knobs(self._space.policy, knobs))
            )
        self._since_ns = now_ns()

    def decide(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        decision = ControlDecision(driver.decide(self._observed()))
        plan = None
        if decision & ControlDecision.CHANGE:
            policy = None if self._tuning is None else with_knobs(self._space.policy, self._tuning.knobs)
            plan = planner.change(policy, backend, driver.failures.collective)
        if decision & ControlDecision.SETTLED:
            self._end()
        self._since_ns = now_ns()
        return plan

    def _observed(self) -> int | None:
        """Rank 0's decision after the iteration that has ended; None on other ranks."""
        if self._tuning is None:
            return None
        changed = self._tuning.observe(now_ns() - self._since_ns)
        return (ControlDecision.CHANGE if changed else ControlDecision.STAY) | (
            ControlDecision.SETTLED if self._tuning.over else ControlDecision.STAY
        )

    def _end(self) -> None:
        self.over = True
        if self._tuning is None:
            return
        # a warning: without logging set up, Python prints nothing below that level
        log.warning("gradlane: %s", self._tuning.describe())
        if self._file is not None:
            found = self.record()
            assert found is not None
            files.leave(self._file, found)

    @property
    def settled(self) -> bool:
        return self.over

    def close(self) -> None:
        """It has no thread and no process to end."""

    def record(self) -> Tuned | None:
        """Rank 0's knobs in force and its trials so far; None on other ranks and before `start`."""
        if self._tuning is None:
            return None
        return msgspec.structs.replace(self._about, knobs=self._tuning.knobs, trials=tuple(self._tuning.trials))


def prepare(
    policy: Policy, specs: tuple[TensorSpec, ...], about: Tuned, rank: int, options: TuneOptions | None, file: Path | None
) -> tuple[Policy, Tuner | None, str]:
    """Read the knobs that a session begins with and make its tuner.

    Args:
        policy: the one that was asked for.
        specs: the model's tensors, which bound the sizes to try.
        about: the record that the tuner completes, and that a file must be of.
        rank: of this process. Rank 0 alone reads the file.
        options: how to tune; None to use the knobs in `file` as they are.
        file: tuned knobs; it may be missing if `options` are given.

    Returns:
        The policy to begin with; a tuner, None without `options`; and rank 0's reason why `file` cannot be used, "" for none.
        The handshake passes the reason on to the other ranks.

    Raises:
        InputError: the policy has nothing to tune.
        UnsupportedError: the search needs scikit-learn, which is not installed. Both on all ranks
            alike.
    """
    fault, space = "", None
    if options is not None:
        if options.search == search.DEFAULT:
            require_scikit_learn()
        space = Space.of(policy, specs)
    if file is not None and rank == 0:
        try:
            policy = _with_knobs_of(file, policy, about, needed=options is None)
        except (InputError, OSError) as error:
            fault = str(error)
    if options is None or space is None:
        return policy, None, fault
    return policy, Tuner(replace(space, policy=policy), options, rank, about, file), fault


def _with_knobs_of(file: Path, policy: Policy, about: Tuned, needed: bool) -> Policy:
    if not file.exists():
        if needed:
            raise InputError(f"knobs: got {str(file)!r}, which does not exist; expected a file that a run with tune left there")
        return policy
    found = files.read(file, Tuned)
    for field in ("policy", "model", "tensors"):
        mine, theirs = getattr(about, field), getattr(found, field)
        if mine != theirs:
            other = f"name that policy (policy={theirs!r}), or " if field == "policy" else ""
            raise InputError(f"knobs: {file} is of {field} {theirs}, this job has {mine}; {other}tune anew, into another file")
    if needed and (found.workers, found.backend) != (about.workers, about.backend):
        log.warning(
            "gradlane: %s was tuned with %d workers over %s, this job has %d over %s: other sizes may be better",
            *(file, found.workers, found.backend, about.workers, about.backend),
        )
    return with_knobs(policy, found.knobs)


def digest(specs: tuple[TensorSpec, ...]) -> str:
    """16 hexadecimal digits over names, dtypes and sizes of `specs`, whatever their order."""
    described = sorted(f"{spec.name} {spec.dtype} {spec.size_bytes}" for spec in specs)
    return sha256("\n".join(described).encode()).hexdigest()[:16]
