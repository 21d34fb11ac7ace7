"""Auto: a session whose policy is found while it trains, and found again when network or worker have changed.

Rank 0 thinks (`thinking`), tries (`tune.choosing`) and watches (`tune.monitor`), in this order and round again; all that
the other ranks see are plans. What was measured decides, what was predicted only says what is worth measuring.
"""

from __future__ import annotations

import logging
from collections import deque
from statistics import median

import msgspec

from gradlane.core.backends import BackendName
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.search_log import Choice, SearchLog, SearchRound, Switch
from gradlane.live.adapt.controller import ControlDecision, ControlDecisions, silence_of
from gradlane.live.adapt.profiling import Planner
from gradlane.live.adapt.ranking_process import RankingProcess
from gradlane.live.adapt.watch import Watch
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.planning.choosing import ALLOWANCE_NS, PART_OF_TIME, Choosing
from gradlane.planning.monitor import PATIENCE
from gradlane.planning.ranking import Answer, Question, likeness, often_good, policy_of

log = logging.getLogger("gradlane")

_MOST, _AGAIN = 6, 2  # plans tried in the first look, and in later ones, ...
_SLOW_NS = 500_000_000  # ... of which one alone where iterations take so long: it is to be over in ten seconds
_KEEP = 1000  # switches on record
_LEAST_QUIET_NS, _MOST_QUIET_NS = 2 * 10**9, 600 * 10**9  # from one look to the next
_THINK_ITERATIONS, _LEAST_THINK_NS, _MOST_THINK_NS = 8, 500_000_000, (3_000_000_000, 500_000_000)


class Auto:
    """Owned by a session; used on the training thread between iterations only.

    about: the record, as yet without looks. servers: in processes of their own.
    """

    over = False  # it goes on watching

    def __init__(self, rank: int, about: SearchLog, backend: BackendName, servers: int, stream_ordered: bool) -> None:
        self._rank, self._about, self._backend, self._servers = rank, about, backend, servers
        self._stream_ordered = stream_ordered
        self._words, self._silence = ControlDecisions(), 1
        self.settled = False
        """Whether something was chosen, and nothing has made it look again since; on all ranks alike."""
        self._in_force = about.safe
        self._thinking: RankingProcess | None = None
        self._choosing: Choosing | None = None
        self._answer = Answer((), ())
        self._plans: dict[Choice, Plan] = {}
        self._why, self._began = "the job has begun", 0
        self._crosses = True  # what was asked for last
        self._recent: deque[int] = deque(maxlen=PATIENCE)
        self._since_ns = self._changing_ns = 0
        self._not_before_ns = self._settled_ns = 0
        self._spent_ns, self._quiet_ns = 0, _LEAST_QUIET_NS

    # -- all ranks ---------------------------------------------------------------------------------------------

    def start(self, planner: Planner, recorder: Recorder) -> None:
        if self._rank == 0:
            self._watch = Watch(recorder, planner.network, self._stream_ordered)
            self._think(planner)
        self._since_ns = now_ns()

    def turn(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        is_due = self._words.is_due(driver)
        word = None
        if self._rank == 0:
            word = self._decide(planner, driver, now_ns() - self._since_ns, is_due)
        plan = None
        if is_due:
            word = self._words.say(driver, word, self._silence)
            self.settled = ControlDecision.SETTLED in word
            if ControlDecision.CHANGE in word:
                began_ns = now_ns()
                plan = planner.change(self._planned(planner), backend, driver.failures.collective)
                self._changing_ns += now_ns() - began_ns
        self._since_ns = now_ns()
        return plan

    def close(self) -> None:
        if self._thinking is not None:
            self._thinking.close()

    def record(self) -> SearchLog | None:
        """All looks so far; None on other ranks than 0."""
        return self._about if self._rank == 0 else None

    # -- rank 0 ------------------------------------------------------------------------------------------------

    def _decide(self, planner: Planner, driver: Driver, took_ns: int, is_due: bool) -> ControlDecision:
        """Take note of the iteration that has ended; the word, where one is due."""
        self._recent.append(took_ns)
        assert planner.profile is not None
        moved = self._watch.observe(driver.plan, planner.profile, took_ns, watching=self.settled)
        if self._choosing is not None:
            changed = self._choosing.observe(took_ns)
            if changed:
                self._in_force = self._choosing.choice
                self._note(driver.iteration + 1)
            if self._choosing.over:
                self._conclude(driver.iteration + 1)
                return ControlDecision.SETTLED | (ControlDecision.CHANGE if changed else ControlDecision.STAY)
            return ControlDecision.CHANGE if changed else ControlDecision.STAY
        if self._thinking is not None:
            answer = self._thinking.answer() if is_due else None
            if answer is not None:
                self._try(answer, driver.plan)
            return ControlDecision.STAY
        # what was ranked for updates that cross the barrier may be wrong for a script that lets none do so
        kept = self._crosses and not planner.crosses
        if (moved is not None or kept) and self._may_look():
            self._why = str(moved) if moved is not None else "updates are needed before the next forward pass"
            self._began = driver.iteration + 1
            if moved is not None:
                planner.network = self._watch.network
                planner.profile = self._watch.profile(planner.profile, moved)
            self._silence = 1
            self._think(planner)
            return ControlDecision.STAY
        return ControlDecision.SETTLED

    def _may_look(self) -> bool:
        """Whether enough time has passed since the last look, and not too much of all time was spent on looking."""
        now = now_ns()
        return now >= self._not_before_ns and self._spent_ns <= ALLOWANCE_NS + PART_OF_TIME * (now - self._settled_ns)

    def _think(self, planner: Planner) -> None:
        assert planner.profile is not None
        iteration_ns = round(median(self._recent)) if self._recent else planner.profile.compute_ns
        look = len(self._about.looks)
        most = _MOST if not look else _AGAIN if iteration_ns < _SLOW_NS else 1
        budget_ns = min(max(_LEAST_THINK_NS, _THINK_ITERATIONS * iteration_ns), _MOST_THINK_NS[bool(look)])
        self._assumed, self._crosses = planner.network, planner.crosses
        self._thinking = RankingProcess(
            Question(planner.profile, planner.network, self._backend, self._servers, look, most, budget_ns, planner.crosses)
        )

    def _try(self, answer: Answer, in_force: Plan) -> None:
        self._thinking, self._answer, self._changing_ns = None, answer, 0
        self._plans = {each.choice: each.plan for each in answer.worth_trying} | {self._in_force: in_force}
        others = [each.choice for each in answer.worth_trying if likeness(each.plan) != likeness(in_force)]
        if not answer.worth_trying:  # it could not be predicted
            untold = often_good(self._backend, external=self._servers > 0)[1:4]
            others = [msgspec.structs.replace(choice, look=len(self._about.looks)) for choice in untold]
        self._choosing = Choosing(self._in_force, self._about.safe, others, again=bool(self._about.looks))

    def _planned(self, planner: Planner) -> Policy | Plan | None:
        """What is to be in force: the plan that was simulated, or that was before; else one for the network as it is."""
        if self._rank:
            return None
        if self._in_force in self._plans:
            return self._plans[self._in_force]
        return policy_of(self._in_force)

    def _conclude(self, iteration: int) -> None:
        """The look is over: say what is kept, and when the next may begin at the earliest."""
        choosing = self._choosing
        assert choosing is not None
        predicted = {each.choice: each.iteration_ns for each in self._answer.predicted}
        verdict = choosing.verdict(predicted.get(choosing.choice))
        if self._about.looks:
            verdict += f"; looked again since {self._why}"
        # a warning, since Python shows nothing less where the script sets up no logging
        log.warning("gradlane: %s", verdict)
        look = SearchRound(
            self._why, self._began, iteration, self._assumed.bytes_per_second, self._answer.predicted, choosing.tried,
            choosing.choice, verdict,
        )  # fmt: skip
        self._about = msgspec.structs.replace(self._about, looks=(*self._about.looks, look))
        kept_ns = choosing.median_ns(choosing.choice)
        assert kept_ns is not None
        now = now_ns()
        if len(self._about.looks) == 1:
            self._settled_ns = now  # the first look is the price of choosing at all
        else:
            self._spent_ns += round(choosing.lost * kept_ns) + self._changing_ns
        # a look that found nothing better puts off the next one twice as long, so that nothing makes it flap
        fruitless = len(self._about.looks) > 1 and choosing.choice == choosing.start
        self._quiet_ns = min(self._quiet_ns * 2, _MOST_QUIET_NS) if fruitless else _LEAST_QUIET_NS
        self._not_before_ns = now + self._quiet_ns
        self._watch.settle(kept_ns)
        self._silence = silence_of(kept_ns)
        self._choosing = None

    def _note(self, iteration: int) -> None:
        switch = Switch(iteration, now_ns(), self._in_force)
        self._about = msgspec.structs.replace(self._about, switches=(*self._about.switches, switch)[-_KEEP:])
