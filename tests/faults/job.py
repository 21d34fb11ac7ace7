"""What a seed means: how many ranks, how late everything is, and what harm comes to which rank at which moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradlane.errors import PeerDied, PeerFailed, PeerStalled
from gradlane.live.comm.control_protocol import BEAT_S, ControlProtocol
from gradlane.live.comm.verdict import Verdict
from tests.faults.channel import Lags, SimulatedChannel
from tests.faults.rank import ByTheHarm, Rank, Sum
from tests.faults.world import Network, World

TIMEOUT_S = 12.0
SPIKE_S = 0.2  # by which a message may be late
MOMENTS = ("attach", "handshake", "rank 0's parameters", "decision", "another plan", "the sums", "close")
LETHAL = ("die", "stop", "freeze", "raise", "leave", "absent", "reset", "sever")
HARMLESS = ("pause", "suspend", "late", "busy")


@dataclass
class Harm:
    """What is done to one rank.

    Args:
        kind: "die", "raise" (an exception), "leave" (it takes fewer steps, in half of all seeds because of an exception between
            two steps), "absent" (it never comes); "stop" for
            good, "freeze" for longer than `stall_timeout`, "pause" for less, "suspend" (all ranks are stopped for a
            while); "reset" or "sever" its connection with rank 0, which tells both ends or neither; "late" (it comes
            late), "busy" (its interpreter is late with everything).
        rank: to which.
        moment: which of the script's moments it follows.
        count: which time the script comes to that moment, from 1.
        delay_s: after that.
        at: when it was done; None if it was not.
    """

    kind: str
    rank: int
    moment: str
    count: int
    delay_s: float
    at: float | None = None

    def __str__(self) -> str:
        when = f"{self.delay_s * 1000:.0f} ms after '{self.moment}' number {self.count}"
        return f"{self.kind} rank {self.rank}" + ("" if self.kind in ("late", "busy", "absent") else f", {when}")

    @property
    def is_lethal(self) -> bool:
        return self.kind in LETHAL


@dataclass(frozen=True)
class Ways:
    """What the ranks run.

    Args:
        protocol: the machine.
        channel: what drives it.
        verdict: what decides which failure stands.
    """

    protocol: type[ControlProtocol[Any]] = ControlProtocol
    channel: type[SimulatedChannel] = SimulatedChannel
    verdict: type[Verdict] = Verdict


TODAY = Ways()


class Job:
    """All ranks of one seed.

    Args:
        seed: decides everything.
        ways: what the ranks run, which may have a defect.
        traces: keep a trace in words.

    Attributes:
        over_servers: whether gradlane's transport carries the sums, which names the process that it lost; or
            torch.distributed, which names nobody.
        says_why: whether a rank that takes fewer steps leaves because of an exception.
        scripts_catch: whether scripts catch the error that training raises, and end their processes without a word.
    """

    def __init__(self, seed: int, ways: Ways = TODAY, traces: bool = False) -> None:
        self.world = World(seed, traces)
        self.over_servers = seed % 3 == 2
        self.scripts_catch = seed % 4 == 3
        self.says_why = seed % 2 == 0
        rng = self.world.rng
        self.draw: Callable[[], float] = rng.random
        self.size = rng.randint(2, 6)
        self.stall_timeout_s, self.timeout_s = rng.choice((1.0, 2.5)), TIMEOUT_S
        self.network = Network(self.world, rng.choice((1e-4, 1e-3, 1e-2)))
        self.harms = self._drawn_harms()
        self.not_finite = (rng.randrange(self.size), rng.randrange(3)) if rng.random() < 0.05 else None
        self.beats_s = rng.choice((0.0, 0.05, self.stall_timeout_s - BEAT_S - SPIKE_S - 0.1))
        self.reads_s = rng.choice((1e-3, 0.05, 0.45))
        busy = [harm.rank for harm in self.harms if harm.kind == "busy"]
        self.lags = [
            Lags(self.draw, 1.5 if rank in busy else self.reads_s, self.beats_s, 0.6 if rank in busy else 0.2)
            for rank in range(self.size)
        ]
        self._step_s = rng.choice((0.01, 0.1, 0.3))
        self.known: dict[int, Callable[[str], None]] = {}  # the store: who is there, and how to call it
        self.sums: dict[str, Sum] = defaultdict(Sum)
        self.plans: dict[int, dict[int, int]] = defaultdict(dict)  # by iteration and rank: the plan that it began with
        self.decisions: dict[int, dict[int, int]] = defaultdict(dict)  # by iteration and rank: what it took
        self._reached: dict[tuple[int, str], int] = defaultdict(int)
        self.ranks = [self._rank(rank, ways) for rank in range(self.size)]
        steps = rng.randint(3, 8)
        self.steps = steps
        for rank in self.ranks:
            leaves = any(harm.kind == "leave" and harm.rank == rank.rank for harm in self.harms)
            rank.steps = steps - 1 if leaves else steps

    def __str__(self) -> str:
        return (
            f"{self.size} ranks, {self.steps} iterations over {'servers' if self.over_servers else 'torch.distributed'}, "
            f"stall_timeout {self.stall_timeout_s:g} s, latency "
            f"{self.network.latency_s * 1000:g} ms, beats up to {self.beats_s:.2f} s late, reads up to {self.reads_s:g} s; "
            f"harm: {'; '.join(map(str, self.harms)) or 'none'}"
            + ("; scripts catch errors and exit" if self.scripts_catch else "")
            + (
                f"; the gradient of rank {self.not_finite[0]} is not finite in iteration {self.not_finite[1]}"
                if self.not_finite
                else ""
            )
        )

    def _drawn_harms(self) -> list[Harm]:
        rng = self.world.rng
        harms = []
        for rank in rng.sample(range(self.size), rng.choice((0, 1, 1, 1, 1, 1, 2))):
            kind = rng.choice(("die", "die", "die", "stop", "freeze", "raise", "raise", *LETHAL, *HARMLESS))
            if kind in ("reset", "sever") and rank == 0:
                kind = "die"
            moment = rng.choice(MOMENTS)
            count = rng.randint(1, 3) if moment in ("decision", "another plan", "the sums") else 1
            harms.append(Harm(kind, rank, moment, count, rng.choice((0.0, 0.002, 0.05, 0.5)) * rng.random()))
        for harm in harms:
            if harm.kind == "suspend":  # alone: two absences in one silence are more than is promised
                return [harm]
        others = [rank for rank in range(self.size) if all(harm.rank != rank for harm in harms)]
        if others and rng.random() < 0.15:
            harms.append(Harm("busy", rng.choice(others), "attach", 1, 0.0))
        return harms

    def _rank(self, number: int, ways: Ways) -> Rank:
        rank = Rank(self, number, ways.verdict)

        def make_channel(**callbacks: Any) -> SimulatedChannel:
            rank.channel = ways.channel(
                rank.process,
                self.network,
                number,
                self.size,
                self.timeout_s,
                self.stall_timeout_s,
                self.lags[number],
                ways.protocol,
                **callbacks,
            )
            rank.channel.known = self.known
            return rank.channel

        rank.make_channel = make_channel
        return rank

    def run(self) -> None:
        """Begin all ranks, and let time pass until nothing is left to wait for."""
        for rank in self.ranks:
            kinds = [harm.kind for harm in self.harms if harm.rank == rank.rank]
            if "absent" in kinds:
                harm = next(harm for harm in self.harms if harm.rank == rank.rank)
                harm.at = 0.0
                continue
            late_s = (0.5 if "late" in kinds else 0.05) * self.timeout_s * self.draw()
            rank.comes = True
            self.world.at(late_s, rank.start)
        self.world.run(10 * self.timeout_s, self.is_over)

    def is_over(self) -> bool:
        """Whether every process is gone, stopped for good or was never there."""
        return all(not rank.process.lives or rank.stopped_for_good for rank in self.ranks if rank.comes)

    # -- harm ---------------------------------------------------------------------------------------

    def reached(self, rank: int, moment: str) -> None:
        """A script has come to a moment."""
        self._reached[rank, moment] += 1
        for harm in self.harms:
            if (harm.rank, harm.moment, harm.count) == (rank, moment, self._reached[rank, moment]):
                self.world.at(self.world.now + harm.delay_s, lambda harm=harm: self._do(harm))

    def _do(self, harm: Harm) -> None:
        rank = self.ranks[harm.rank]
        if not rank.process.lives or harm.kind in ("late", "busy", "leave", "absent"):
            return
        harm.at = self.world.now
        self.world.say("HARM", "{}", harm)
        if harm.kind == "die":
            loses = self.draw() < 0.3
            rank.process.end(loses)
            self.gone(harm.rank, loses)
        elif harm.kind == "raise":
            rank.interrupt(ByTheHarm("a bad image"))
        elif harm.kind == "suspend":
            # longer than between two looks, or short enough for each alone
            for_s = 2 * BEAT_S + 3 * self.draw() if self.draw() < 0.7 else self._spare_s * self.draw()
            for each in self.ranks:
                if each.comes and each.process.lives and not each.process.is_stopped:
                    each.process.stop()
                    self.world.at(self.world.now + for_s + 0.05 * self.draw(), lambda each=each: self._go_on(each))
        elif harm.kind in ("stop", "freeze", "pause"):
            rank.process.stop()
            rank.stopped_for_good = harm.kind == "stop"
            if self.over_servers and harm.kind != "pause":
                self._lose_sums_of(harm.rank)
            for_s = self._spare_s * self.draw() if harm.kind == "pause" else self.stall_timeout_s + 1 + 3 * self.draw()
            if harm.kind != "stop":
                self.world.at(self.world.now + for_s, lambda: self._go_on(rank))
        else:
            for end in rank.channel.ends:
                end.reset() if harm.kind == "reset" else end.sever()

    def _go_on(self, rank: Rank) -> None:
        if rank.process.lives and not rank.stopped_for_good:
            self.world.say(rank.process, "continues")
            rank.process.go_on()

    @property
    def _spare_s(self) -> float:
        """For how long a rank may be stopped, or a little longer, without being silent for too long."""
        return self.stall_timeout_s - BEAT_S - self.beats_s - SPIKE_S - 0.05

    # -- what scripts share -------------------------------------------------------------------------

    def step_s(self, rank: int) -> float:
        """For how long a rank computes."""
        return self._step_s * (0.5 + self.draw())

    def come(self, rank: Rank) -> None:
        """A rank says in the store that it is there."""

        def call(token: str) -> None:
            rank.token = token
            rank.look()

        def here() -> None:
            self.known[rank.rank] = call

        self.world.at(self.world.now + self.network.delay(), here)

    def enter(self, rank: int, what: str, brings: Any) -> Sum:
        """A rank begins a collective."""
        self.reached(rank, next(moment for moment in MOMENTS if what.startswith(moment)))
        one = self.sums[what]
        one.in_store = what == "handshake"
        one.entered.add(rank)
        one.what[rank] = brings
        if len(one.entered) == self.size:
            for each in self.ranks:
                each.process.after(self.network.delay(), lambda each=each: self._end(one, each))
        elif not one.in_store:
            gone = next((other for other in range(self.size) if self.is_gone(other) and other not in one.entered), None)
            if gone is not None:
                self._fail(one, rank, gone)
        return one

    def _end(self, one: Sum, rank: Rank) -> None:
        if rank.rank not in one.broken:
            one.ended.add(rank.rank)
            rank.look()

    def is_gone(self, rank: int) -> bool:
        """Whether its process has ended."""
        return self.ranks[rank].comes and not self.ranks[rank].process.lives

    def gone(self, gone: int, loses: bool = False) -> None:
        """A process has ended: collectives that it takes part in may fail on others.

        Args:
            gone: which.
            loses: what it has sent already may be lost.
        """
        for one in self.sums.values():
            for rank in sorted(one.entered - one.ended) if not one.in_store else ():
                if gone not in one.entered or loses:
                    self._fail(one, rank, gone)

    def _lose_sums_of(self, stopped: int) -> None:
        """A rank is stopped: what its server has not sent does not come, and the others' nodes find it silent."""
        for what, one in self.sums.items():
            for rank in sorted(one.entered - one.ended - {stopped}) if what.startswith("the sums") else ():
                self._suspect(one, rank, self.stall_timeout_s, PeerStalled(f"transport: rank {stopped} is silent", stopped))

    def _fail(self, one: Sum, rank: int, gone: int) -> None:
        """What carries a collective says that a connection has ended. torch.distributed may not notice."""
        of = self.ranks[gone]
        if self.over_servers and of.error is not None:
            self._suspect(one, rank, 0.0, PeerFailed(f"transport: rank {gone} failed: {of.error}", gone))
        elif self.over_servers:
            self._suspect(one, rank, 0.0, PeerDied(f"transport: rank {gone}: its process ended, or left", gone))
        elif self.draw() < 0.7:
            self._suspect(one, rank, 0.05 * self.draw(), RuntimeError("connection closed by peer"))

    def _suspect(self, one: Sum, rank: int, after_s: float, error: Exception) -> None:
        one.broken.add(rank)
        victim = self.ranks[rank]
        victim.process.after(self.network.delay() + after_s, lambda: victim.failures.suspect(error))

    def left(self, rank: int) -> None:
        """A script has come to its end."""
        self.reached(rank, "close")
        for harm in self.harms:
            if harm.rank == rank and harm.kind == "leave":
                harm.at = self.world.now

    def why_it_leaves(self, rank: int) -> Exception | None:
        """The exception between two steps that makes a rank leave; None if it leaves at its end."""
        leaves = any(harm.rank == rank and harm.kind == "leave" for harm in self.harms)
        return ByTheHarm("no more images") if leaves and self.says_why else None

    def began(self, rank: int, iteration: int, plan: int) -> None:
        """A rank begins an iteration with a plan."""
        self.plans[iteration][rank] = plan

    def decided(self, rank: int, iteration: int, decision: int) -> None:
        """A rank acts on a decision before an iteration."""
        self.decisions[iteration][rank] = decision
