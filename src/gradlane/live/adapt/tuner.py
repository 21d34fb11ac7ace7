"""Tuner: a session's knobs, changed while it trains (`turns`).

Where the plan changes, it is rank 0's, shared and proven equal as the first one was. Rank 0 takes the times: ranks
that wait for one another's gradients have iterations of one length.
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
from gradlane.core.tuned import Tuned
from gradlane.errors import InputError
from gradlane.live.adapt.controller import ControlDecision
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

_PRIOR_STEPS = 5  # sizes of each knob that are simulated: seconds at most, while the other ranks wait


class Tuner:
    """Owned by a session; used on the training thread between iterations only.

    about: the record, without knobs and trials. file: where rank 0 leaves it.
    """

    def __init__(self, space: Space, options: TuneOptions, rank: int, about: Tuned, file: Path | None) -> None:
        self.over = False
        self._space, self._options = space, options
        self._rank, self._about, self._file = rank, about, file
        self._tuning: Tuning | None = None
        self._since_ns = 0

    def start(self, planner: Planner, recorder: Recorder) -> None:
        """The policy's first plan is in force from now on. On rank 0: predict, so that the search has a beginning."""
        if self._rank == 0:
            options, prior = self._options, None
            if options.search == search.DEFAULT:
                prior = search.predicted(self._space, planner.simulated_ns, _PRIOR_STEPS)
            searching = search.start(options.search, self._space.dimensions, options.seed, prior)
            self._tuning = Tuning(self._space, searching, options)
        self._since_ns = now_ns()

    def turn(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        """All ranks, between two iterations: what rank 0 decides. Returns the plan to take up, if it is another."""
        turn = ControlDecision(driver.decide(self._decide()))
        plan = None
        if turn & ControlDecision.CHANGE:
            policy = None if self._tuning is None else with_knobs(self._space.policy, self._tuning.knobs)
            plan = planner.change(policy, backend, driver.failures.collective)
        if turn & ControlDecision.SETTLED:
            self._end()
        self._since_ns = now_ns()
        return plan

    def _decide(self) -> int | None:
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
        # a warning, since Python shows nothing less where the script sets up no logging
        log.warning("gradlane: %s", self._tuning.describe())
        if self._file is not None:
            found = self.record()
            assert found is not None
            files.write(self._file, found)

    @property
    def settled(self) -> bool:
        return self.over

    def close(self) -> None:
        """Nothing of it runs by itself."""

    def record(self) -> Tuned | None:
        """What is in force and the trials so far; None on other ranks than 0, and before the first trial."""
        if self._tuning is None:
            return None
        return msgspec.structs.replace(self._about, knobs=self._tuning.knobs, trials=tuple(self._tuning.trials))


def prepare(
    policy: Policy, specs: tuple[TensorSpec, ...], about: Tuned, rank: int, options: TuneOptions | None, file: Path | None
) -> tuple[Policy, Tuner | None, str]:
    """The policy to begin with, a tuner where `options` ask for one, and what is wrong with `file` ("" for nothing).

    Rank 0 alone reads the file, so that the others have to be told of its faults. Raises on all ranks alike `InputError`
    where the policy has nothing to tune and `UnsupportedError` where the search lacks its library.
    """
    fault, space = "", None
    if options is not None:
        if options.search == search.DEFAULT:
            require_scikit_learn()
        space = Space.of(policy, specs)
    if file is not None and rank == 0:
        try:
            policy = _with_knobs_of(file, policy, about, needed=options is None)
        except InputError as error:
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
            raise InputError(f"knobs: {file} is of {field} {theirs}, this job has {mine}; tune anew, into another file")
    if needed and (found.workers, found.backend) != (about.workers, about.backend):
        log.warning(
            "gradlane: %s was tuned with %d workers over %s, this job has %d over %s: other sizes may be better",
            *(file, found.workers, found.backend, about.workers, about.backend),
        )
    return with_knobs(policy, found.knobs)


def digest(specs: tuple[TensorSpec, ...]) -> str:
    """What tells one model's tensors from another's, whatever their order."""
    described = sorted(f"{spec.name} {spec.dtype} {spec.size_bytes}" for spec in specs)
    return sha256("\n".join(described).encode()).hexdigest()[:16]
