"""OneByOne ends the messages that SharedLink ends, in the same order and at the same times, to the nanosecond."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.core.network import CostSegment, Network
from gradlane.sim.fabric import FOREVER
from gradlane.sim.one_by_one import OneByOne
from gradlane.sim.shared_link import SharedLink


def carried(link: SharedLink | OneByOne, messages: list[tuple[int, int, int, int | None]], classes: list[int]) -> object:
    """When each message ends, in order; a message is when it is added, its lane, its size and its half."""
    ended = []

    def run(until_ns: int) -> None:
        while (now_ns := link.next_ns()) <= until_ns:
            message = link.run()
            if message is not None:
                ended.append((now_ns, message))

    for message, (at_ns, lane, size_bytes, half) in enumerate(sorted(messages, key=lambda each: each[0])):
        run(at_ns)
        link.add(at_ns, message, size_bytes, classes[lane], half, lane)
    run(FOREVER - 1)
    return ended


@settings(max_examples=400, deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 2), st.integers(1, 40), st.sampled_from([None, 0, 1])), max_size=24
    ),
    classes=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    startup_ns=st.integers(0, 9),
    least_ns=st.integers(0, 12),
    rate=st.sampled_from([10**9, 3 * 10**8, 10**11]),
)
def test_both_links_end_the_same_messages_at_the_same_times(
    messages: list[tuple[int, int, int, int | None]], classes: list[int], startup_ns: int, least_ns: int, rate: int
) -> None:
    network = Network(2, (CostSegment(startup_ns, rate),), min_message_ns=least_ns)
    assert carried(OneByOne(network), messages, classes) == carried(SharedLink(network), messages, classes)
