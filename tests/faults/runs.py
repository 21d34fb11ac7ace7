"""Runs one seed, and says what happened in it."""

from __future__ import annotations

from tests.faults.checks import problems
from tests.faults.job import TODAY, Job, Ways


def run(seed: int, ways: Ways = TODAY, traces: bool = False) -> tuple[Job, list[str]]:
    """The job of a seed when it is over, and what is wrong with it."""
    job = Job(seed, ways, traces)
    job.run()
    return job, problems(job)


def report(seed: int, ways: Ways = TODAY) -> str:
    """What happens in a seed, in words, and what is wrong."""
    job, wrong = run(seed, ways, traces=True)
    return "\n".join([f"seed {seed}: {job}", *job.world.trace, *(f"WRONG: {each}" for each in wrong), ""])
