"""Who makes room where too many connections have not said who they are."""

from __future__ import annotations

from collections import Counter
from random import Random

from gradlane.live.comm.control_actions import Drop
from gradlane.live.comm.control_protocol import ControlProtocol
from gradlane.transport.strangers import MAX_STRANGERS, origin_of, who_makes_room


def test_nobody_goes_while_there_is_room() -> None:
    assert who_makes_room([], "a", 1) is None
    assert who_makes_room(["a"] * 3, "a", 4) is None


def test_one_address_drives_out_its_own_oldest_and_nobody_else() -> None:
    assert who_makes_room(["b", "a", "a", "a"], "a", 4) == 1
    assert who_makes_room(["b", "a", "a", "a"], "b", 4) == 1


def test_the_oldest_goes_where_all_are_alike() -> None:
    assert who_makes_room(["a", "a"], "a", 2) == 0
    assert who_makes_room(["a", "b"], "c", 2) == 0


def test_addresses_share_the_places_whatever_order_they_call_in() -> None:
    for seed in range(30):
        rng = Random(seed)
        origins: list[int] = []
        called: Counter[int] = Counter()
        for _ in range(300):
            newcomer = 0 if rng.random() < 0.8 else rng.randrange(1, 5)
            goes = who_makes_room(origins, newcomer, 16)
            if goes is not None:
                assert Counter([*origins, newcomer])[origins[goes]] == max(
                    Counter([*origins, newcomer])[each] for each in origins
                )
                assert origins[goes] not in origins[:goes]
                del origins[goes]
            origins.append(newcomer)
            called[newcomer] += 1
            assert len(origins) <= 16
            for origin in called:  # five of them: each has what it asked for, up to its share
                assert Counter(origins)[origin] >= min(called[origin], 16 // 5)


def test_an_ipv6_network_is_one_origin_and_a_mapped_address_is_the_ipv4_one() -> None:
    assert origin_of("2001:db8:0:1::1") == origin_of("2001:db8:0:1:ffff::2") != origin_of("2001:db8:0:2::1")
    assert origin_of("::ffff:10.0.0.1") == origin_of("10.0.0.1") != origin_of("10.0.0.2")
    assert origin_of("fe80::1%eth0") == origin_of("fe80::2%eth0")
    assert origin_of("") == ""


def test_a_rank_that_has_yet_to_send_its_token_stays_while_another_address_calls_without_end() -> None:
    rank_0: ControlProtocol[str] = ControlProtocol(0, range(2), 60.0, 2.5, 0.0)
    for number in range(MAX_STRANGERS):
        rank_0.accept(f"stranger {number}", "10.0.0.66")
    rank_0.accept("rank 1", "10.0.0.1")
    dropped = {
        action.connection
        for number in range(200)
        for action in rank_0.accept(f"late stranger {number}", "10.0.0.66")
        if isinstance(action, Drop)
    }
    assert len(dropped) == 200
    assert "rank 1" not in dropped
