"""What a lab's spec refuses, what its options and files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradlane.core.cluster import Link, RateStep
from gradlane.errors import FormatError, InputError
from gradlane.lab import Flow, HostSpec, JobSpec, LabSpec
from gradlane.lab.files import read_spec, write_spec
from gradlane.lab.spec import class_of, type_of_service
from tests.commands import invoke

MBIT = 125_000

EVERYTHING = LabSpec(
    6,
    10**9,
    unlike=(HostSpec(2, Link(100 * MBIT, (RateStep(10**9, 50 * MBIT),)), None, 150),),
    network_classes=8,
    jobs=(JobSpec((0, 1), (2, 3), ("python", "a.py"), environment={"A": "b"}, name="a"), JobSpec((4,), command=("true",))),
    traffic=(Flow(0, 5, 10 * MBIT, 5, 10, 1),),
    scale=0.1,
)


def test_a_spec_in_a_file_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    write_spec(path, EVERYTHING)
    assert read_spec(path) == EVERYTHING


def test_yaml_says_the_same(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "lab.yaml"
    path.write_text("hosts: 3\nlink_bits_per_second: 500000000\nunlike:\n- host: 1\n  compute_percent: 200\n")
    assert read_spec(path) == LabSpec(3, 500_000_000, unlike=(HostSpec(1, compute_percent=200),))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"hosts": 2, "speed": 5}', r"got the unknown field 'speed'"),
        ('{"hosts": 2, "unlike": [{"host": "one"}]}', r"\$\.unlike\[0\]\.host"),
        ('{"hosts": 2, "unlike": [{"host": 5}]}', r"unlike: got 5, expected a host from 0 to 1"),
        ("hosts", "got no JSON"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "lab.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=place):
        read_spec(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"unlike": (HostSpec(1), HostSpec(1))},
        {"unlike": (HostSpec(2),)},
        {"jobs": (JobSpec((0, 2)),)},
        {"jobs": (JobSpec((0,), (9,)),)},
        {"traffic": (Flow(0, 2),)},
        {"network_classes": 9},
        {"scale": 0.0},
        {"scale": 0.001, "link_bits_per_second": 10**8},
        {"unlike": (HostSpec(0, Link(MBIT, (RateStep(1, 10),))),)},
        {"ranks_per_host": 0},
        {"ranks_per_host": 2, "jobs": (JobSpec((0, 1)),)},
    ],
)
def test_a_lab_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InputError, match="expected"):
        LabSpec(2, **fields)


def test_flows_and_jobs_that_cannot_be_are_refused() -> None:
    for make in (lambda: Flow(1, 1), lambda: Flow(0, 1, start_ns=5, end_ns=4), lambda: JobSpec(()), lambda: HostSpec(-1)):
        with pytest.raises(InputError, match="expected"):
            make()


def test_marks_are_of_their_class_on_switches_of_any_number_of_classes() -> None:
    # RFC 2597 and 3246: EF is DSCP 46, AF41, AF31, AF21 and AF11 are 34, 26, 18 and 10
    assert [type_of_service(network_class) for network_class in range(6)] == [184, 136, 104, 72, 40, 0]
    for classes in range(1, 9):
        # unmarked traffic is of the last class, however many there are
        expected = [min(network_class, classes - 1) for network_class in range(5)] + [classes - 1] * 3
        assert [class_of(type_of_service(network_class) >> 5, classes) for network_class in range(8)] == expected
    assert [class_of(precedence, 3) for precedence in range(8)] == [2, 2, 2, 2, 1, 0, 0, 0]


def spec_of(tmp_path: Path, *options: str) -> LabSpec:
    path = tmp_path / "lab.json"
    invoke("lab", *options, "--write", path)
    return read_spec(path)


def test_options_say_what_a_file_says(tmp_path: Path) -> None:
    assert spec_of(tmp_path, "--hosts", "4", "--link", "1gbit", "--scale", "0.1") == LabSpec(4, 10**9, scale=0.1)
    apart = spec_of(tmp_path, "--hosts", "2", "--servers", "2", "--classes", "2")
    assert apart == LabSpec(4, network_classes=2, jobs=(JobSpec((0, 1), (2, 3)),))
    together = spec_of(tmp_path, "--hosts", "3", "--servers", "2", "--together")
    assert together == LabSpec(3, jobs=(JobSpec((0, 1, 2), (0, 1)),))
    several = spec_of(tmp_path, "--hosts", "2", "--ranks-per-host", "3")
    assert (several, several.all_jobs) == (LabSpec(2, ranks_per_host=3), (JobSpec((0, 0, 0, 1, 1, 1)),))
    served = spec_of(tmp_path, "--hosts", "2", "--ranks-per-host", "2", "--servers", "1")
    assert served == LabSpec(3, jobs=(JobSpec((0, 0, 1, 1), (2,)),))
    uneven = spec_of(tmp_path, "--up", "1=100mbit", "--down", "0=50mbit", "--slow", "1=200", "--traffic", "0:1=8mbit")
    assert uneven == LabSpec(
        2,
        unlike=(HostSpec(0, down=Link(50 * MBIT)), HostSpec(1, Link(100 * MBIT), compute_percent=200)),
        traffic=(Flow(0, 1, 8 * MBIT),),
    )


def test_a_varied_rate_is_drawn_between_its_bounds_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    spec, again, other = (spec_of(tmp_path, "--vary", f"1=100mbit..1gbit/5s/{seed}") for seed in (7, 7, 8))
    assert spec == again
    assert spec != other
    up, down = spec.links(1)
    assert up == down
    assert [step.at_ns for step in up.steps[:3]] == [0, 5 * 10**9, 10 * 10**9]
    rates = [step.bytes_per_second / MBIT for step in up.steps]
    assert 100 <= min(rates) < 120
    assert 980 < max(rates) <= 1000


@pytest.mark.parametrize(
    "options",
    [
        ["--up", "one=100mbit"], ["--up", "1"], ["--slow", "1=fast"], ["--vary", "1=100mbit/5s"], ["--traffic", "0-1"],
        ["--servers", "3", "--together"], ["--file", "lab.json", "--hosts", "2"], ["--file", "not-there.json"],
        ["--ranks-per-host", "17"],
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(options: list[str]) -> None:
    assert "expected" in invoke("lab", *options, "true", code=2)
