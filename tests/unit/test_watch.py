from __future__ import annotations

from collections.abc import Sequence

from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.live.adapt.watch import Watch
from gradlane.live.comm.recorder import Recorder, Row
from gradlane.planning.monitor import LEARN
from gradlane.planning.rounds import Round
from gradlane.testing.generators import profile_of

MS = 10**6
PLAN = Plan("p", "m", (TensorSpec("t", 4000),), (Message((Slice(0, 0, 4000),)),))


def looks(iterations_ns: Sequence[int]) -> list[int]:
    """Which of these iterations were looked at; those of 1 ms are normal."""
    over: list[int] = []
    seen: list[int] = []

    def look(last: bool) -> list[Row]:
        seen.append(len(over))
        return []

    recorder = Recorder()
    recorder.note_elsewhere(look)
    watch = Watch(recorder, (Place(Network.line(2, MS, 10**6), "all-reduce"),), stream_ordered=False, on_device=False)
    watch.settle(MS)
    profile = profile_of((1, 4000))
    for took_ns in iterations_ns:
        watch.observe(PLAN, profile, Round(took_ns))
        over.append(took_ns)
    return seen


# A look takes the processor more than 10 us, so that the rest behind it is longer than two iterations of 1 ms.
def test_no_look_is_at_an_iteration_because_there_was_a_pause_in_it():
    pauses = [3600 * 10**9 if each % 3 == 0 else MS for each in range(300)]
    rested = [each for each in looks([MS] * LEARN + pauses) if each >= LEARN]
    assert rested
    assert all((each - LEARN) % 3 == 1 for each in rested)


def test_behind_an_iteration_that_differs_the_next_is_looked_at():
    iterations = [MS] * LEARN + [MS // 4] * 5000
    seen = looks(iterations)
    # How long it rested before it knew is the machine's affair. Once it has seen one, it leaves out only those during
    # which other processes had the processor, however many these are on this machine; resting, it would look at one
    # in twenty at most.
    last = [each for each in seen if each >= len(iterations) - 1000]
    assert next(each for each in seen if each >= LEARN) > LEARN
    assert len(last) > 200
