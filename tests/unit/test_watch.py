from __future__ import annotations

from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.live.adapt.watch import Watch
from gradlane.live.comm.recorder import Recorder, Row
from gradlane.planning.monitor import LEARN
from gradlane.testing.generators import profile_of

MS = 10**6
PLAN = Plan("p", "m", (TensorSpec("t", 4000),), (Message((Slice(0, 0, 4000),)),))


def test_no_look_is_at_an_iteration_because_there_was_a_pause_in_it():
    seen: list[int] = []
    recorder, iteration = Recorder(), 0

    def look(last: bool) -> list[Row]:
        seen.append(iteration)
        return []

    recorder.note_elsewhere(look)
    watch = Watch(recorder, (Place(Network.line(2, MS, 10**6), "all-reduce"),), stream_ordered=False)
    profile = profile_of((1, 4000))
    for iteration in range(LEARN + 300):
        # a look takes the processor more than 10 us, so that the rest is longer than the two iterations between pauses
        pause = iteration >= LEARN and iteration % 3 == 0
        watch.observe(PLAN, profile, 3600 * 10**9 if pause else MS)
    rested = [each for each in seen if each >= LEARN]
    assert rested
    assert all(each % 3 == 1 for each in rested)
