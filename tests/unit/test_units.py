from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.errors import InputError
from gradlane.units import format_bytes, format_ns, format_rate, parse_bytes, parse_ns, parse_rate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("512k", 524_288),
        ("1.5KiB", 1_536),
        ("4MiB", 4_194_304),
        ("4M", 4_194_304),
        ("25MB", 25_000_000),
        (" 2 gb ", 2_000_000_000),
        ("1GiB", 1_073_741_824),
    ],
)
def test_a_size_is_binary_with_k_or_kib_and_decimal_with_kb(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 10**9), ("0.5Gbit", 5 * 10**8), ("100mbit", 10**8), ("10 Gbps", 10**10), ("64kbit/s", 64_000), ("1bit", 1)],
)
def test_a_rate_is_in_bits_per_second(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "4 MiB extra", "4XB", "nan", "1gbit", "\u0661"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="expected a number and a unit such as 4MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "10", "4MiB", "-1gbit", "inf"])
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="expected a number and a unit such as 500mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0gbit", "0.1bit"])
def test_a_rate_of_zero_is_refused(text):
    with pytest.raises(InputError, match="expected more than zero"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1_048_575, "1.0 MiB"),
        (3_670_016, "3.5 MiB"),
        (5 * 2**40, "5120.0 GiB"),
    ],
)
def test_sizes_print_for_people(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 us"),
        (999_994, "999.99 us"),
        (999_996, "1.00 ms"),
        (3_500_000, "3.50 ms"),
        (2_000_000_000, "2.00 s"),
        (-1_500, "-1.50 us"),
    ],
)
def test_times_print_for_people(time, text):
    assert format_ns(time) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (1, "8 bit/s"),
        (125, "1 kbit/s"),
        (62_500_000, "500 Mbit/s"),
        (124_930_000, "999 Mbit/s"),
        (124_990_000, "1 Gbit/s"),
        (1_250_000_000, "10 Gbit/s"),
    ],
)
def test_rates_print_in_bits_as_networks_are_sold(rate, text):
    assert format_rate(rate) == text


@given(st.integers(0, 2**40))
def test_a_whole_number_of_bytes_parses_to_itself(size):
    assert parse_bytes(str(size)) == size
    assert parse_bytes(f"{size}KiB") == 1024 * size


@pytest.mark.parametrize(("text", "time"), [("0us", 0), ("50us", 50_000), ("1.5ms", 1_500_000), ("2s", 2 * 10**9), ("7 ns", 7)])
def test_a_time_has_a_unit(text, time):
    assert parse_ns(text) == time


@pytest.mark.parametrize("text", ["", "5", "-1us", "1h"])
def test_what_is_no_time_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="expected a number and a unit such as 50us"):
        parse_ns(text)


@pytest.mark.parametrize(
    ("parse", "text", "most"),
    [
        (parse_bytes, "1048577GiB", "1048576.0 GiB"),
        (parse_rate, "81tbit", "80 Tbit/s"),
        (parse_ns, "1000000001s", "1000000000.00 s"),
        (parse_ns, "9" * 400 + "s", "1000000000.00 s"),
    ],
)
def test_what_is_too_much_is_refused_with_the_limit(parse, text, most):
    with pytest.raises(InputError, match=f"expected at most {most}$"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("10GB/s", "80gbit"), ("10 GBps", "80gbit"), ("1.5MB/s", "12mbit"), ("125kB", "1000kbit"), ("10gb", "10gbit")],
)
def test_a_rate_in_bytes_is_refused_with_the_same_in_bits(text, meant):
    with pytest.raises(InputError, match=rf"\(did you mean {meant}\?\)"):
        parse_rate(text)
