"""What has to be so when a simulated job is over, whatever harm came to it."""

from __future__ import annotations

import re
from collections.abc import Callable

from gradlane.errors import CommunicationError, MismatchError, NotFiniteError, PeerError
from gradlane.live.comm.control_protocol import BEAT_S
from gradlane.live.comm.verdict import LEFT_S, VERDICT_S
from tests.faults.job import SPIKE_S, Harm, Job
from tests.faults.rank import GRACE_S, Rank


def problems(job: Job) -> list[str]:
    """All that is wrong with a job that has run; empty if nothing is."""
    found = []
    for rank in job.ranks:
        if rank.comes and rank.process.lives and not rank.stopped_for_good:
            found.append(f"rank {rank.rank} is still there, {rank.state}")
        elif rank.comes:
            found += _of_one(job, rank)
    return found + _of_all(job)


def _of_one(job: Job, rank: Rank) -> list[str]:
    found = []
    mine = [harm for harm in _done(job) if harm.rank == rank.rank]
    if not mine:
        found += _error_of_a_healthy_rank(job, rank)
        over_s, what = rank.longest_wait
        if over_s > _lag_s(job):
            found.append(f"rank {rank.rank} waited for {what} for {over_s:.2f} s longer than it may")
    elif rank.error is not None and not any(harm.kind in ("reset", "sever") for harm in mine) and not _rank_0_was_away(job):
        named = None if isinstance(rank.error, NotFiniteError) or _came_too_late(job, rank) else _named(rank.error)
        if named is not None and named not in _culprits(job):
            found.append(f"rank {rank.rank}, which came to harm itself, names rank {named}, which is healthy: {rank.error}")
    if rank.channel is not None and rank.channel.held:
        found.append(f"rank {rank.rank} holds {rank.channel.held} connections after it has closed its channel")
    return found


def _error_of_a_healthy_rank(job: Job, rank: Rank) -> list[str]:
    error, who = rank.error, f"rank {rank.rank}"
    if error is None:
        return []  # it had all that it needed before the harm
    said = f"{type(error).__name__}: {error}"
    named, at = _named(error), rank.failures.failed_at or rank.ended_at or 0.0
    if isinstance(error, NotFiniteError):
        return [] if job.not_finite is not None and named == job.not_finite[0] else [f"{who} names rank {named}: {said}"]
    culprits = _culprits(job)
    if not culprits:
        return [f"no harm was done, but {who} ends with {said}"]
    if _came_too_late(job, rank):
        return []
    if _rank_0_was_away(job) and "failed in torch" in str(error):
        return []  # nobody was named in time, and a rank said what it knew
    if named is None:
        return [f"{who} names nobody: {said}"]
    if (
        named not in culprits
        and not job.over_servers
        and job.ranks[named].has_left
        and (job.ranks[0].has_left or any(job.ranks[culprit].has_left for culprit in culprits))
    ):
        return []  # nobody tells of failures any more, or tells them of a rank that has left in order
    if named not in culprits:
        return [f"{who} names rank {named}, which is healthy: {said}"]
    first = min(_done(job), key=_known_at(job))
    harm = next(harm for harm in _done(job) if harm.rank == named)
    found = []
    why = f"PeerFailed: rank {named} failed: ByTheHarm: no more images"
    if harm.kind == "leave" and isinstance(error, PeerError) and (said == why) != job.says_why:
        found.append(f"{who} is not told why rank {named} left, or told a reason that it has not: {said}")
    if harm.at is None or at < harm.at - 1e-9:
        found.append(f"{who} names rank {named} before anything was done to it: {said}")
    if harm is not first and (first.at or 0.0) + _bound_s(job, first) < (harm.at or 0.0):
        found.append(f"{who} names rank {named}, but rank {first.rank} was the first: {said}")
    # with several, what one does may hide the other until it is found itself
    limit_s = max(map(_known_at(job), _done(job)))
    late_s = at - max(limit_s, (rank.met_at or rank.started_at) + _bound_s(job, first))
    if late_s > 0:
        found.append(f"{who} is told {late_s:.2f} s too late: {said}")
    return found


def _of_all(job: Job) -> list[str]:
    found = []
    for what, by_iteration in (("plans", job.plans), ("decisions", job.decisions)):
        for iteration, by_rank in by_iteration.items():
            if len(set(by_rank.values())) > 1:
                found.append(f"several {what} in iteration {iteration}: {by_rank}")
    names = {
        rank.rank: named
        for rank in job.ranks
        if rank.met_at is not None and not any(harm.rank == rank.rank for harm in _done(job))
        if (named := _named(rank.error)) is not None and not isinstance(rank.error, NotFiniteError)
    }
    if len(set(names.values())) > 1 and not any(harm.rank == 0 for harm in _done(job)):
        found.append(f"ranks name different culprits: {names}")
    return found


def _came_too_late(job: Job, rank: Rank) -> bool:
    """Whether the job was over when it came, so that nobody was there to say why."""
    is_excused = not isinstance(rank.error, PeerError) or any(_is_late(job, each) for each in (0, rank.rank))
    return rank.met_at is None and is_excused and _named(rank.error) == 0


def _is_late(job: Job, rank: int) -> bool:
    """Whether something harmless makes this rank late by more than a verdict waits."""
    return any(harm.kind == "suspend" or (harm.rank == rank and harm.kind in ("busy", "pause")) for harm in job.harms)


def _rank_0_was_away(job: Job) -> bool:
    """Whether rank 0 may not have named anybody for as long as a verdict is waited for, while another rank came to harm."""
    away = [harm for harm in job.harms if harm.rank == 0 and harm.kind in ("busy", "pause", "freeze", "stop")]
    return bool(away or any(harm.kind == "suspend" for harm in job.harms)) and len(job.harms) > 1


def _done(job: Job) -> list[Harm]:
    return [harm for harm in job.harms if harm.is_lethal and harm.at is not None]


def _culprits(job: Job) -> set[int]:
    return {harm.rank for harm in _done(job)}


def _known_at(job: Job) -> Callable[[Harm], float]:
    return lambda harm: (harm.at or 0.0) + _bound_s(job, harm)


def _lag_s(job: Job) -> float:
    return 0.1 + 2 * max(lags.reads_s for lags in job.lags)


def _bound_s(job: Job, harm: Harm) -> float:
    """Seconds from a harm until every rank that has met the others must have been told."""
    told_s = 2 * (2 * job.network.latency_s + SPIKE_S) + 2 * _lag_s(job)
    silent_s = job.stall_timeout_s + BEAT_S + _lag_s(job)
    if job.ranks[harm.rank].met_at is None or (harm.at or 0.0) < (job.ranks[harm.rank].met_at or 0.0):
        return job.timeout_s + GRACE_S + told_s  # nobody knows it yet: it is missing when the time is over
    # Whoever was stopped or late itself hears late, and listens anew before it judges.
    if any(_is_late(job, each) for each in range(job.size)):
        told_s += job.stall_timeout_s
        silent_s += job.stall_timeout_s + 6 * _lag_s(job)
    if job.ranks[harm.rank].has_left:
        told_s += VERDICT_S  # it had left in order, and no failure is told
    if harm.kind in ("stop", "freeze", "sever"):
        return silent_s + told_s
    return told_s + (LEFT_S if harm.kind == "leave" else 0.0)


def _named(error: BaseException | None) -> int | None:
    """The rank that an error holds to be the cause; None if it names none."""
    if isinstance(error, (PeerError, NotFiniteError)):
        return error.rank
    if isinstance(error, (MismatchError, CommunicationError)):
        match = re.search(
            r"missing: \[(\d+)|no word from rank (\d+)|control channel of rank (\d+)|no verdict from rank (\d+)", str(error)
        )
        if match:
            return int(next(group for group in match.groups() if group is not None))
    return None
