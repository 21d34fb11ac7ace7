from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.core.bus import Bus
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.errors import InputError
from gradlane.planning.fit import LATENCY_STEPS, fit_bus, fit_network

SIZES = [4 * 2**power for power in range(20)]
RECORDED = Path(__file__).parents[3] / "shared" / "data" / "b-caffe-googlenet-k80"


def sweep(network: Network, sizes: list[int], repeats: int = 1) -> list[tuple[int, int]]:
    return [(size, network.cost_ns(size)) for size in sizes for _ in range(repeats)]


def test_two_sizes_on_a_line_give_the_line():
    fitted = fit_network([(1_000, 60_000), (101_000, 160_000)], workers=4, algorithm="ring", source="by hand")
    assert fitted == Network(
        4, (CostSegment(59_000, 10**9),), "ring", 0.0, "by hand; 2 samples of 2 sizes, 1000 B to 98.6 KiB; one line"
    )


@settings(deadline=None)
@given(devices=st.integers(2, 8), startup_ns=st.integers(0, 10**6), rate=st.integers(10**7, 10**11))
def test_the_bus_that_sums_within_hosts_took_is_recovered(devices, startup_ns, rate):
    stage = Bus(devices, startup_ns, rate).reduce_scatter
    took = [(size, stage.startup_ns + stage.bytes_ns(size)) for size in SIZES[6:]]
    fitted = fit_bus(took, devices, packet_bytes=4096, source="by hand")
    assert (fitted.devices, fitted.packet_bytes) == (devices, 4096)
    assert fitted.startup_ns == pytest.approx(startup_ns, abs=2)
    assert fitted.bytes_per_second == pytest.approx(rate, rel=1e-3)
    assert fitted.source.startswith("by hand; 14 sizes, 256 B to 2.0 MiB")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(startup_ns=st.integers(1_000, 10**7), rate=st.integers(10**6, 10**11))
def test_an_exact_line_is_recovered(startup_ns, rate):
    line = Network.line(2, startup_ns, rate)
    samples = sweep(line, SIZES)
    fitted = fit_network(samples, 2)
    assert len(fitted.segments) == 1
    # durations are cut to whole nanoseconds
    for size, cost in samples:
        assert fitted.cost_ns(size) == pytest.approx(cost, rel=1e-3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), startup_ns=st.integers(1_000, 10**7), rate=st.integers(10**7, 10**10))
def test_a_fifth_of_the_samples_ten_times_too_slow_does_not_move_the_line(seed, startup_ns, rate):
    line = Network.line(2, startup_ns, rate)
    samples = sweep(line, SIZES, repeats=5)
    late = set(Random(seed).sample(range(len(samples)), len(samples) // 5))
    spoilt = [(size, cost * 10 if index in late else cost) for index, (size, cost) in enumerate(samples)]
    fitted = fit_network(spoilt, 2)
    for size in SIZES:
        assert fitted.cost_ns(size) == pytest.approx(line.cost_ns(size), rel=0.05)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_fifth_of_the_sizes_ten_times_too_slow_does_not_move_the_line(seed):
    line = Network.line(2, 100_000, 10**8)
    late = set(Random(seed).sample(range(len(SIZES)), len(SIZES) // 5))
    spoilt = [(size, cost * 10 if index in late else cost) for index, (size, cost) in enumerate(sweep(line, SIZES))]
    fitted = fit_network(spoilt, 2)
    for index, size in enumerate(SIZES):
        if index not in late:
            assert fitted.cost_ns(size) == pytest.approx(line.cost_ns(size), rel=0.05)


@settings(max_examples=100, deadline=None)
@given(noise=st.dictionaries(st.integers(1, 2**40), st.integers(2**27, 10**12), min_size=2, max_size=30))
def test_from_any_noise_comes_a_network_without_negative_costs(noise):
    fitted = fit_network(noise.items(), 2)
    assert all(piece.startup_ns >= 0 and piece.bytes_per_second > 0 for piece in fitted.segments)
    # the line of no startup and the greatest rate misses each size by less than all of it, so that the best
    # line's errors have a mean below 1, and half of them cannot be above 2
    assert 0 <= fitted.residual <= 2


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_ten_per_cent_of_noise_about_a_line_stays_one_line(seed):
    random = Random(seed)
    line = Network.line(2, 200_000, 10**8)
    fitted = fit_network([(size, round(cost * random.uniform(0.9, 1.1))) for size, cost in sweep(line, SIZES, 3)], 2)
    assert len(fitted.segments) == 1
    assert fitted.startup_ns == pytest.approx(200_000, rel=0.1)
    assert fitted.bytes_per_second == pytest.approx(10**8, rel=0.15)


def test_falling_times_give_a_line_that_does_not_fall():
    fitted = fit_network([(1_000, 100_000), (2_000, 90_000), (4_000, 50_000)], 2)
    assert len(fitted.segments) == 1
    assert fitted.cost_ns(4_000) >= fitted.cost_ns(1_000)


def test_a_line_that_would_start_below_zero_starts_at_zero():
    # through (1000, 1000) and (2000, 3000) the startup would be -1000
    fitted = fit_network([(1_000, 1_000), (2_000, 3_000)], 2)
    assert fitted.startup_ns == 0
    assert fitted.bytes_per_second in (10**9, 666_666_667)


def test_a_jump_is_two_pieces_that_break_where_it_is():
    truth = Network(8, (CostSegment(70_000, 50_000_000, 8_192), CostSegment(900_000, 320_000_000)))
    fitted = fit_network(sweep(truth, [2**power for power in range(2, 24)]), 8)
    small, large = fitted.segments
    assert small.up_to_bytes == 8_192
    assert small.startup_ns == pytest.approx(70_000, rel=0.01)
    assert large.startup_ns == pytest.approx(900_000, rel=0.01)
    assert large.bytes_per_second == pytest.approx(320_000_000, rel=0.01)
    assert fitted.residual < 0.001
    assert fitted.source.endswith("two lines that meet at 8.0 KiB")


def test_a_kink_is_two_pieces_that_meet_without_a_jump():
    # 10 ns a byte up to 100 kB, 1 ns a byte beyond
    sizes = range(10_000, 400_000, 7_000)
    fitted = fit_network([(size, 1_000 + 10 * size if size <= 100_000 else 901_000 + size) for size in sizes], 2)
    small, large = fitted.segments
    assert small.startup_ns == pytest.approx(1_000, abs=5)
    assert small.bytes_per_second == 10**8
    assert small.up_to_bytes == pytest.approx(100_000, abs=2)
    assert large.startup_ns == pytest.approx(901_000, abs=5)
    assert large.bytes_per_second == 10**9
    assert fitted.cost_ns(small.up_to_bytes + 1) == pytest.approx(fitted.cost_ns(small.up_to_bytes), abs=20)


def test_two_lines_are_not_taken_where_the_cost_would_fall_at_the_break_and_the_data_rise():
    # a first line through (118, 1050) and the plateau's begin would overshoot it by a third before it ends
    times = {118: 1050, 394: 4050, 475: 4051, 637: 4051, 681: 4052, 686: 4052, 695: 4052, 1541: 4057, 1544: 4062, 1905: 4072}
    fitted = fit_network(times.items(), 2)
    assert len(fitted.segments) == 1
    assert fitted.startup_ns == pytest.approx(4_040, abs=10)


def test_a_dense_sweep_of_thousands_of_sizes_is_fitted_all_the_same():
    line = Network.line(2, 50_000, 10**9)
    fitted = fit_network(sweep(line, list(range(1_000, 4_000_000, 1_000))), 2)
    assert fitted.segments == (CostSegment(50_000, 10**9),)
    assert "3999 samples of 3999 sizes" in fitted.source


@pytest.mark.parametrize(
    ("samples", "fault"),
    [
        ([], "got 0 different sizes, expected 2 or more"),
        ([(8, 5), (8, 6)], "got 1 different sizes, expected 2 or more"),
        ([(8, 5), (16, 0)], r"samples\[1\]: got a duration of 0 ns"),
        ([(8, -5), (16, 1)], r"samples\[0\]: got a duration of -5 ns"),
        ([(8, float("nan")), (16, 1)], r"samples\[0\]: got a duration of nan ns"),
        ([(8, float("inf")), (16, 1)], r"samples\[0\]: got a duration of inf ns"),
        ([(10**6, 99), (16, 1)], r"samples\[0\]: got 1000000 bytes in 99 ns, expected at most 10000000000000 bytes a second"),
        ([(0, 5), (16, 1)], r"samples\[0\]: got a size of 0 bytes"),
        ([(-8, 5), (16, 1)], r"samples\[0\]: got a size of -8 bytes"),
    ],
)
def test_a_sweep_of_no_use_is_refused(samples, fault):
    with pytest.raises(InputError, match=fault):
        fit_network(samples, 2)


# startup and rate of the large messages, as read off the recordings by eye to within a fifth
@pytest.mark.parametrize(("workers", "startup_us", "mb_per_second"), [(2, 100, 605), (4, 185, 486), (8, 900, 323)])
def test_a_recorded_sweep_with_a_jump_between_8_and_12_kb_is_two_pieces(workers, startup_us, mb_per_second):
    path = RECORDED / f"allreduce{workers}.log"
    if not path.exists():
        pytest.skip(f"the recording {path.name} is not here")
    rows = [re.split(r"[,\s]+", line.strip()) for line in path.read_text().splitlines() if line[:1].isdigit()]
    fitted = fit_network([(int(row[-2]), round(float(row[-1]) * 1000)) for row in rows], workers)
    assert len(fitted.segments) == 2
    assert fitted.segments[0].up_to_bytes == 8_192
    assert fitted.startup_ns == pytest.approx(startup_us * 1000, rel=0.2)
    assert fitted.bytes_per_second == pytest.approx(mb_per_second * 10**6, rel=0.2)
    assert fitted.residual < 0.06


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    share=st.integers(0, LATENCY_STEPS),
    startup_ns=st.integers(10**5, 10**7),
    rate=st.integers(10**7, 10**10),
    workers=st.integers(2, 6),
)
def test_the_latency_of_a_network_is_found_from_its_streams(share, startup_ns, rate, workers):
    sharing = Sharing(2, 2 * (workers - 1))
    truth = Network(workers, (CostSegment(startup_ns, rate, latency_ns=startup_ns * share // LATENCY_STEPS),), sharing=sharing)
    streams = [(size, 8, truth.stream_ns(size, 8)) for size in SIZES]
    fitted = fit_network(sweep(truth, SIZES), workers, streams=streams, sharing=sharing)
    for size, messages, duration_ns in streams:
        assert fitted.stream_ns(size, messages) == pytest.approx(duration_ns, rel=0.01)
    # a small message's stream has two at once and no more, so that from half on latency is told by larger ones only
    if share <= LATENCY_STEPS // 2:
        assert fitted.segments[0].latency_ns == pytest.approx(truth.segments[0].latency_ns, abs=startup_ns * 0.02)


def test_the_residual_is_that_of_messages_alone():
    alone = [(size, 100_000 + 10 * size) for size in (1_024, 16_384, 65_536, 262_144, 1_048_576)]
    streams = [(size, 8, round(8 * 1.3 * took)) for size, took in alone]
    fitted = fit_network(alone, 2, streams=streams, sharing=Sharing(2))
    errors = [abs(fitted.cost_ns(size) - took) / took for size, took in alone]
    assert fitted.residual == pytest.approx(sorted(errors)[2]) == pytest.approx(0.3, abs=0.01)


def test_streams_that_save_more_than_startups_tell_the_rate():
    # (bytes, us alone, us in a row) of sums between two hosts of three ranks, beside computing, over links for 6.4 MB/s
    took = [(256, 4_570, 2_360), (1_024, 4_600, 1_930), (4_096, 5_220, 2_400)]
    took += [(16_384, 10_170, 3_210), (65_536, 17_730, 11_020)]
    longer = [(262_144, 55_330), (1_048_576, 208_580), (4_194_304, 615_180)]
    alone = [(size, took_us * 1_000) for size, took_us in [(size, alone_us) for size, alone_us, _ in took] + longer]
    streams = [(size, 8, 8_000 * in_a_row_us) for size, _, in_a_row_us in took]
    without = fit_network(alone, 2, sharing=Sharing(2))
    fitted = fit_network(alone, 2, streams=streams, sharing=Sharing(2))
    assert without.bytes_per_second == pytest.approx(5.2e6, rel=0.03)
    assert fitted.bytes_per_second == pytest.approx(6.25e6, rel=0.03)
    assert fitted.stream_ns(65_536, 8) == pytest.approx(8 * 11_020_000, rel=0.02)


def test_of_streams_that_save_nothing_no_latency_comes_and_from_none_neither():
    line = Network.line(2, 200_000, 10**8)
    sharing = Sharing(2, 2)
    streams = [(size, 8, 8 * line.cost_ns(size)) for size in SIZES]
    assert fit_network(sweep(line, SIZES), 2, streams=streams, sharing=sharing).segments[0].latency_ns == 0
    assert fit_network(sweep(line, SIZES), 2, sharing=sharing).segments[0].latency_ns == 0


def test_a_third_of_the_streams_five_times_too_slow_does_not_move_the_latency():
    sharing = Sharing(2, 2)
    truth = Network(2, (CostSegment(1_000_000, 10**8, latency_ns=400_000),), sharing=sharing)
    streams = [(size, 8, truth.stream_ns(size, 8) * (5 if repeat == 2 else 1)) for size in SIZES for repeat in range(3)]
    fitted = fit_network(sweep(truth, SIZES), 2, streams=streams, sharing=sharing)
    assert fitted.segments[0].latency_ns == pytest.approx(400_000, rel=0.02)
    assert fitted.source.endswith("one line; streams of 20 kinds")


def test_where_streams_cost_more_than_messages_alone_their_mean_is_what_a_message_costs():
    # every second message stalls for 3 ms, which the median of messages alone does not show
    line, paid = Network.line(2, 1_000_000, 10**8), Network.line(2, 2_500_000, 10**8)
    streams = [(size, 8, 8 * paid.cost_ns(size)) for size in SIZES]
    fitted = fit_network(sweep(line, SIZES), 2, streams=streams, sharing=Sharing(2, 2))
    assert fitted.startup_ns == pytest.approx(2_500_000, rel=0.01)
    assert fitted.segments[0].latency_ns == 0


def test_a_stream_of_no_use_is_refused():
    with pytest.raises(InputError, match=r"streams\[0\]: got 0 messages of 8 bytes in 5 ns"):
        fit_network([(8, 500), (16, 600)], 2, streams=[(8, 0, 5)], sharing=Sharing(2))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), min_message_ns=st.integers(10**6, 4 * 10**6), rate=st.integers(10**7, 10**8))
def test_what_no_message_goes_below_is_found_and_bytes_behind_it_cost_nothing(seed, min_message_ns, rate):
    random = Random(seed)
    truth = Network(2, (CostSegment(100_000, rate),), min_message_ns=min_message_ns)
    sizes = [256 * 4**power for power in range(8)]
    fitted = fit_network([(size, round(cost * random.uniform(0.97, 1.03))) for size, cost in sweep(truth, sizes, 3)], 2)
    assert fitted.min_message_ns == pytest.approx(min_message_ns, rel=0.05)
    assert fitted.startup_ns == fitted.min_message_ns
    assert fitted.bytes_per_second == pytest.approx(rate, rel=0.1)
    assert fitted.source.endswith("one line and a least cost")


def test_what_small_messages_take_in_streams_says_nothing_of_what_they_take_alone():
    # two emulated hosts beside computing: alone all small ones take the same, together tiny ones take longer than others
    alone_us = {256: 1914, 1024: 2001, 4096: 1891, 16_384: 1602, 65_536: 2664, 262_144: 8715}
    together_us = {256: 1452, 1024: 902, 4096: 699, 16_384: 599, 65_536: 2303, 262_144: 8634}
    streams = [(size, 32, 32_000 * each) for size, each in together_us.items()]
    fitted = fit_network([(size, 1_000 * each) for size, each in alone_us.items()], 2, streams=streams, sharing=Sharing(2, 2))
    assert fitted.min_message_ns == pytest.approx(1_900_000, rel=0.05)
    assert fitted.cost_ns(262_144) == pytest.approx(8_715_000, rel=0.05)


def test_what_a_least_cost_saves_in_a_row_is_its_latency():
    # alone a small message takes twice as long: it wakes who sleeps
    sizes = [256 * 4**power for power in range(8)]
    truth = Network(2, (CostSegment(0, 10**7),), min_message_ns=1_500_000)
    alone = [(size, max(cost, 3_000_000)) for size, cost in sweep(truth, sizes)]
    streams = [(size, 8, 8 * truth.cost_ns(size)) for size in sizes if size < 10**6]
    fitted = fit_network(alone, 2, streams=streams, sharing=Sharing(2, 2))
    assert (fitted.min_message_ns, fitted.min_message_latency_ns) == (3_000_000, 1_500_000)
    assert fitted.stream_ns(256, 8) == pytest.approx(8 * 1_500_000, rel=0.1)
    assert fitted.stream_ns(4 * 2**20, 8) == 8 * fitted.cost_ns(4 * 2**20)


def test_a_least_cost_is_a_mean_since_a_plan_pays_for_the_slow_ones_too():
    sizes = [256 * 4**power for power in range(8)]
    truth = Network(2, (CostSegment(0, 10**7),), min_message_ns=1_000_000)
    samples = [
        (size, cost + (2_000_000 if size < 10**4 and turn % 4 == 0 else 0))
        for turn in range(20)
        for size, cost in sweep(truth, sizes)
    ]
    assert fit_network(samples, 2).min_message_ns == pytest.approx(1_420_000, rel=0.02)
