"""`check_fabric` finds each broken promise and says which it is."""

from __future__ import annotations

import itertools

import pytest

from gradlane.sim.fabric import FOREVER, Notice
from gradlane.testing.fabrics import check_fabric


class Sound:
    """Each message is pushed 10 ns after all ranks have handed it over, and pulled 10 ns later; each class below breaks one
    promise of it.
    """

    ranks = 2

    def __init__(self, job):
        self.events = 0
        self.two_phase = [message.two_phase for message in job.plan.messages]
        self.given, self.coming = {}, []

    def hand_over(self, now_ns, rank, message):
        kinds = (False,) if self.two_phase[message] else (False, True)
        self.give(now_ns, message, kinds)

    def ask(self, now_ns, rank, message):
        self.give(now_ns, message, (True,))

    def give(self, now_ns, message, kinds):
        self.given[message] = self.given.get(message, 0) + 1
        if self.given[message] == self.ranks:
            self.given[message] = 0
            for place, pulled in enumerate(kinds):
                self.coming += [Notice(now_ns + 10 * (place + 1), rank, message, pulled) for rank in range(self.ranks)]

    def next_ns(self):
        return min((notice.now_ns for notice in self.coming), default=FOREVER)

    def run(self, until_ns):
        at_ns = self.next_ns()
        if at_ns > until_ns:
            return []
        self.events += 1
        found = [notice for notice in self.coming if notice.now_ns == at_ns]
        self.coming = [notice for notice in self.coming if notice.now_ns != at_ns]
        return found


class Impatient(Sound):
    """Pushes and pulls what one rank has handed over."""

    def give(self, now_ns, message, kinds):
        self.given[message] = self.given.get(message, 0) + 1
        rank, self.given[message] = self.given[message] - 1, self.given[message] % self.ranks
        self.coming += [Notice(now_ns + 10 * (place + 1), rank, message, pulled) for place, pulled in enumerate(kinds)]


class Hasty(Sound):
    """Has notices of several times in one answer."""

    def run(self, until_ns):
        return list(itertools.chain.from_iterable(iter(lambda: super(Hasty, self).run(until_ns), [])))


class Late(Sound):
    def run(self, until_ns):
        return super().run(until_ns + 7)


class Lazy(Sound):
    def run(self, until_ns):
        return super().run(until_ns - 100)


class Backwards(Sound):
    def give(self, now_ns, message, kinds):
        super().give(now_ns - 15, message, kinds)


class Inventive(Sound):
    def run(self, until_ns):
        return [notice._replace(rank=notice.rank + 1) for notice in super().run(until_ns)]


class Repeating(Sound):
    def run(self, until_ns):
        return super().run(until_ns) * 2


class Unasked(Sound):
    """Returns a two-phase message that nobody has asked for."""

    def hand_over(self, now_ns, rank, message):
        self.give(now_ns, message, (False, True))


class Failing(Sound):
    def ask(self, now_ns, rank, message):
        raise KeyError(message)


class Counting(Sound):
    def run(self, until_ns):
        self.events -= 2
        return super().run(until_ns)


class Begun(Sound):
    def next_ns(self):
        return min(super().next_ns(), 10**9)


class Varying(Sound):
    made = itertools.count()

    def __init__(self, job):
        super().__init__(job)
        self.extra_ns = next(self.made) % 2

    def give(self, now_ns, message, kinds):
        super().give(now_ns + self.extra_ns, message, kinds)


class Forgetful(Sound):
    """Carries nothing of a second iteration."""

    def give(self, now_ns, message, kinds):
        if self.given.get(message) != 0:
            super().give(now_ns, message, kinds)


def test_a_sound_fabric_passes():
    check_fabric(Sound, ranks=2, one_order=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Impatient, "the sum is there without the part of rank 1"),
        (Hasty, "notices of one call are of the times"),
        (Late, r"a notice of \d+, where \d+ was next and \d+ the end"),
        (Lazy, "it has not run to"),
        (Backwards, r"at \d+ what happens next is said to have happened at"),
        (Inventive, "there are 2 ranks|it was not handed over"),
        (Repeating, "it was not handed over, or was pushed before|it was not pushed|it was not asked for"),
        (Unasked, "it was not asked for"),
        (Failing, r"the simulation ends with KeyError\(\d\)"),
        (Counting, r"the fabric had taken \d+ steps, and now -"),
        (Begun, "before anything is handed over, something happens at 1000000000"),
        (Varying, "two fabrics that are made alike do not do the same"),
        (Forgetful, "was handed over, and then forgotten"),
    ],
)
def test_a_broken_promise_is_found_and_named(make, reason):
    with pytest.raises(AssertionError, match=reason):
        check_fabric(make, ranks=2, one_order=True)


def test_an_iteration_that_is_too_fast_is_found():
    with pytest.raises(AssertionError, match=r"an iteration takes \d+ ns, and no fabric takes less than"):
        check_fabric(Sound, ranks=2, one_order=True, least_ns=lambda profile: 2 * profile.compute_ns + 1_000)
