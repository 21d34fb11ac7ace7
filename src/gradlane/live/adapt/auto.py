"""Auto: finds a session's policy while it trains, and searches again when network, worker or model
have changed.

Rank 0 goes through three phases, again and again; other ranks only receive plans:

    rank    simulate all policies in a process of its own (`RankingProcess`)
    try     train some iterations under each of the best predicted; the times measured decide
            (`planning.choosing`)
    watch   compare iterations with those measured (`planning.monitor`) until something has changed

One search, ranking and trying, is a "look" in the `SearchLog`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from statistics import median

from msgspec import UNSET, structs

from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.records.search_log import ANY, Choice, SearchLog, SearchRound, Switch
from gradlane.live.adapt.decisions import ControlDecision, ControlDecisions, quiet_iterations
from gradlane.live.adapt.profiling import Planner
from gradlane.live.adapt.ranking_process import RankingProcess
from gradlane.live.adapt.round_clock import RoundClock
from gradlane.live.adapt.search_turns import SEARCH_TURNS
from gradlane.live.adapt.watch import Watch
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.planning.choosing import ALLOWANCE_NS, PART_OF_TIME, Choosing
from gradlane.planning.monitor import PATIENCE
from gradlane.planning.ranking import Answer, Question, candidates_at, likeness, policy_of, safe_choice
from gradlane.planning.rounds import Round

log = logging.getLogger("gradlane")

_MOST_PLANS, _MOST_PLANS_AGAIN = 6, 2  # tried in the first search and in each later one
# iterations from this length on: a later search tries one plan, so that it ends within ten seconds
_SLOW_NS = 500_000_000
_UNRANKED = 3  # plans to try if there is no ranking
_MOST_SWITCHES = 1000  # on record
_LEAST_PAUSE_NS, _MOST_PAUSE_NS = 2 * 10**9, 600 * 10**9  # from the end of a search to the next
# limit of a ranking: the time of 8 iterations, but at least 0.5 s, and at most 3 s in the first
# search and 0.5 s in later ones
_RANKING_ITERATIONS, _LEAST_RANKING_NS, _MOST_RANKING_NS = 8, 500_000_000, (3_000_000_000, 500_000_000)


class Auto:
    """A `PlanController` that searches for the fastest policy.

    Args:
        rank: of this process.
        model: the model's name, for the record.
        places: one for each backend to choose from. The safe choice, over the first of them, is in
            force at the start.
        stream_ordered, on_device: see `Watch`.
    """

    over = False  # auto watches until the session ends

    def __init__(self, rank: int, model: str, places: Sequence[Place], stream_ordered: bool, on_device: bool) -> None:
        self._rank, self._hearing = rank, (stream_ordered, on_device)
        backend = places[0].backend if len(places) == 1 else ANY
        self._about = SearchLog(model, places[0].network.workers, backend, safe_choice(places))
        self._decisions, self._quiet_iterations = ControlDecisions(), 1
        self.settled = False
        """Whether no search is going on. The same on all ranks."""
        self._in_force = self._about.safe
        self._ranking: RankingProcess | None = None
        self._ranked: Answer | None = None  # the ranking's answer, which waits for this session's turn to try
        self._choosing: Choosing | None = None
        self._answer = Answer((), ())
        self._plans: dict[Choice, Plan] = {}
        self._why, self._began = "the job has begun", 0
        self._some_cross = True  # `planner.some_cross` when the last ranking began
        self._recent: deque[int] = deque(maxlen=PATIENCE)
        self._clock = RoundClock()
        self._changing_ns = self._changes_seen = 0
        self._not_before_ns = self._settled_ns = 0
        self._spent_ns, self._pause_ns = 0, _LEAST_PAUSE_NS

    # -- all ranks ---------------------------------------------------------------------------------

    def start(self, planner: Planner, recorder: Recorder) -> None:
        if self._rank == 0:
            self._recorder = recorder
            self._watch = Watch(recorder, planner.places, *self._hearing)
            self._start_ranking(planner)
        self._clock.start()

    def decide(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        is_due = self._decisions.is_due(driver)
        decision = None
        if self._rank == 0:
            decision = self._observe(planner, driver, self._clock.ended(self._recorder.stepped), is_due)
        plan = None
        if is_due:
            decision = self._decisions.announce(driver, decision, self._quiet_iterations)
            self.settled = ControlDecision.SETTLED in decision
            if ControlDecision.CHANGE in decision:
                began_ns = now_ns()
                over = self._in_force.backend or UNSET
                plan = planner.change(self._plan_of_choice(), backend, driver.failures.collective, over)
                self._changing_ns += now_ns() - began_ns
                SEARCH_TURNS.note_change(self)
        self._clock.start()
        return plan

    def close(self) -> None:
        SEARCH_TURNS.leave(self)
        if self._ranking is not None:
            self._ranking.close()

    def record(self) -> SearchLog | None:
        """Rank 0's searches so far; None on other ranks."""
        return self._about if self._rank == 0 else None

    # -- rank 0 ------------------------------------------------------------------------------------

    def _observe(self, planner: Planner, driver: Driver, ended: Round | None, is_due: bool) -> ControlDecision:
        """Take note of the round that has `ended`; None while it goes on. Returns what to announce if
        a decision is due.
        """
        if ended is None:
            return ControlDecision.SETTLED if self._choosing is None and self._ranking is None else ControlDecision.STAY
        self._recent.append(ended.took_ns)
        self._changes_seen, others_changed = SEARCH_TURNS.changes_of_others(self, self._changes_seen)
        if others_changed:
            self._watch.settle()  # what was normal beside another session's former plan
        assert planner.profile is not None
        moved = self._watch.observe(driver.plan, planner.profile, ended, watching=self.settled)
        if self._choosing is not None:
            SEARCH_TURNS.take(self)
            changed = self._choosing.observe(ended.took_ns)
            if changed:
                self._in_force = self._choosing.choice
                self._record_switch(driver.iteration + 1)
            if self._choosing.over:
                self._conclude(driver.iteration + 1)
                return ControlDecision.SETTLED | (ControlDecision.CHANGE if changed else ControlDecision.STAY)
            return ControlDecision.CHANGE if changed else ControlDecision.STAY
        if self._ranking is not None:
            if is_due and self._ranked is None:
                self._ranked = self._ranking.answer()
            if is_due and self._ranked is not None and SEARCH_TURNS.take(self):
                self._try(self._ranked, planner, driver.plan)
            return ControlDecision.STAY
        # the policies were ranked for updates that cross the barrier, and by now it is known that
        # this script allows none
        has_barrier = self._some_cross and not planner.some_cross
        if (moved is not None or has_barrier) and self._may_search():
            self._why = str(moved) if moved is not None else "updates are needed before the next forward pass"
            self._began = driver.iteration + 1
            if moved is not None:
                planner.plan_for(self._watch.places())
                planner.profile = self._watch.profile(planner.profile, moved)
            self._quiet_iterations = 1
            self._start_ranking(planner)
            return ControlDecision.STAY
        return ControlDecision.SETTLED

    def _may_search(self) -> bool:
        """Whether the pause after the last search is over, and searching has cost a small enough
        part of all time.
        """
        now = now_ns()
        return now >= self._not_before_ns and self._spent_ns <= ALLOWANCE_NS + PART_OF_TIME * (now - self._settled_ns)

    def _start_ranking(self, planner: Planner) -> None:
        assert planner.profile is not None
        iteration_ns = round(median(self._recent)) if self._recent else planner.profile.compute_ns
        look = len(self._about.looks)
        most = _MOST_PLANS if not look else _MOST_PLANS_AGAIN if iteration_ns < _SLOW_NS else 1
        budget_ns = min(max(_LEAST_RANKING_NS, _RANKING_ITERATIONS * iteration_ns), _MOST_RANKING_NS[bool(look)])
        self._assumed, self._some_cross = planner.places[0].network, planner.some_cross
        places = tuple(structs.replace(place, coordinated=False) for place in planner.places)
        self._ranking = RankingProcess(Question(planner.profile, places, look, most, budget_ns, planner.crosses, planner.clips))

    def _try(self, answer: Answer, planner: Planner, in_force: Plan) -> None:
        self._ranking, self._ranked, self._answer, self._changing_ns = None, None, answer, 0
        self._plans = {each.choice: each.plan for each in answer.worth_trying} | {self._in_force: in_force}
        others = [each.choice for each in answer.worth_trying if likeness(each.plan) != likeness(in_force)]
        if not answer.worth_trying:  # the ranking has failed
            assert planner.profile is not None
            unranked = itertools.islice(candidates_at(planner.profile, planner.places, planner.clips), _UNRANKED + 1)
            others = [structs.replace(choice, look=len(self._about.looks)) for _, choice in unranked][1:]
        crosses = frozenset(choice for choice, plan in self._plans.items() if planner.crosses_with(plan))
        self._choosing = Choosing(
            self._in_force, self._about.safe, others, again=bool(self._about.looks), crosses=crosses.__contains__
        )

    def _plan_of_choice(self) -> Policy | Plan | None:
        """Rank 0's plan for the choice in force: the one that was simulated or in force before;
        else its policy, to plan for the present network. None on other ranks.
        """
        if self._rank:
            return None
        if self._in_force in self._plans:
            return self._plans[self._in_force]
        return policy_of(self._in_force)

    def _conclude(self, iteration: int) -> None:
        """End the search: log and record its result, and set when the next may begin."""
        choosing = self._choosing
        assert choosing is not None
        predicted = {each.choice: each.iteration_ns for each in self._answer.predicted}
        verdict = choosing.verdict(predicted.get(choosing.choice))
        if self._about.looks:
            verdict += f"; looked again since {self._why}"
        # a warning: without logging set up, Python prints nothing below that level
        log.warning("gradlane: %s", verdict)
        look = SearchRound(
            self._why, self._began, iteration, self._assumed.bytes_per_second, self._answer.predicted, choosing.tried,
            choosing.choice, verdict,
        )  # fmt: skip
        self._about = structs.replace(self._about, looks=(*self._about.looks, look))
        kept_ns = choosing.median_ns(choosing.choice)
        assert kept_ns is not None
        now = now_ns()
        if len(self._about.looks) == 1:
            self._settled_ns = now  # the cost of the first search counts against nothing
        else:
            start_ns = choosing.median_ns(choosing.start) or kept_ns
            self._spent_ns += round(max(0.0, choosing.lost) * start_ns) + self._changing_ns
        # a search that found nothing better doubles the pause before the next, so that noise cannot
        # keep it searching
        fruitless = len(self._about.looks) > 1 and choosing.choice == choosing.start
        self._pause_ns = min(self._pause_ns * 2, _MOST_PAUSE_NS) if fruitless else _LEAST_PAUSE_NS
        self._not_before_ns = now + self._pause_ns
        self._watch.settle(kept_ns)
        self._quiet_iterations = quiet_iterations(kept_ns)
        self._choosing = None
        SEARCH_TURNS.leave(self)

    def _record_switch(self, iteration: int) -> None:
        switch = Switch(iteration, now_ns(), self._in_force)
        self._about = structs.replace(self._about, switches=(*self._about.switches, switch)[-_MOST_SWITCHES:])
