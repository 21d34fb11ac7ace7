"""Labs whose hosts are not alike: servers, uneven and changing links, priority classes, other traffic, several jobs."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gradlane import lab, zoo
from gradlane.core.cluster import Cluster, Host, Link, RateStep, Server, Worker
from gradlane.errors import InputError
from gradlane.lab import Flow, HostSpec, JobSpec, LabSpec
from gradlane.lab.files import write_spec
from gradlane.lab.links.gauges import Sample, read_samples
from gradlane.lab.spec import type_of_service
from tests.commands import command_line
from tests.lab.test_lab import HERE, PAYLOAD_SHARE, python

pytestmark = pytest.mark.matrix

LIMIT_SECONDS = 40
MBIT = 125_000


@pytest.fixture(scope="module", autouse=True)
def _lab_is_supported() -> None:
    reason = lab.supported()
    if reason is not None:
        pytest.skip(reason)


def write_environment(folder: Path) -> tuple[str, ...]:
    """A command that leaves its environment in a file named by role, job's port and number."""
    program = f"""
import json, os
env = os.environ
name = "-".join((env["GRADLANE_LAB_ROLE"], env["MASTER_PORT"], env.get("RANK") or env["GRADLANE_LAB_SERVER"]))
json.dump(dict(env), open({str(folder)!r} + "/" + name, "w"))
"""
    return tuple(python(program))


def test_servers_run_on_their_hosts_beside_the_ranks(tmp_path: Path) -> None:
    command = write_environment(tmp_path)
    job = JobSpec((0, 1), (2, 1), server_command=command)
    spec = LabSpec(3, 10**9, unlike=(HostSpec(1, compute_percent=150),), jobs=(job,), scale=0.5)
    outcome = lab.execute(spec, command, timeout=LIMIT_SECONDS)
    assert (outcome.exit_code, outcome.exit_codes) == (0, (0, 0))
    seen = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(seen) == ["server-29500-0", "server-29500-1", "worker-29500-0", "worker-29500-1"]
    assert [seen[name]["GRADLANE_LAB_ADDRESS"] for name in sorted(seen)] == ["10.77.0.3", "10.77.0.2", "10.77.0.1", "10.77.0.2"]
    assert [seen[name]["GRADLANE_LAB_COMPUTE_PERCENT"] for name in sorted(seen)] == ["100", "150", "100", "150"]
    assert {name: seen["worker-29500-1"][name] for name in ("WORLD_SIZE", "GRADLANE_LAB_SERVERS", "GRADLANE_LAB_SCALE")} == {
        "WORLD_SIZE": "2", "GRADLANE_LAB_SERVERS": "2", "GRADLANE_LAB_SCALE": "0.5",
    }  # fmt: skip
    assert seen["worker-29500-0"]["GRADLANE_LAB_LINK"] == "500000000"


def test_a_server_that_fails_ends_the_run() -> None:
    job = JobSpec((0, 1), (2,), ("sh", "-c", "sleep 600"), ("sh", "-c", "exit 3"))
    outcome = lab.execute(LabSpec(3, jobs=(job,)), grace=0)
    assert (outcome.exit_code, outcome.first_failed_rank, outcome.exit_codes) == (3, None, (143, 143))


def test_servers_that_outlive_the_ranks_are_ended_with_them() -> None:
    job = JobSpec((0,), (1,), ("sh", "-c", "exit 0"), ("sh", "-c", "sleep 600"))
    assert lab.execute(LabSpec(2, jobs=(job,)), timeout=LIMIT_SECONDS).exit_code == 0


@pytest.mark.parametrize("way", ["success", "failure", "interrupt", "kill"])
def test_ranks_and_servers_leave_nothing_however_the_lab_ends(held, way: str, tmp_path: Path) -> None:
    interfaces = socket.if_nameindex()
    begin, forever = held.command[-1].split("; wait")[0], held.command[-1]
    then = {"success": "exit 0", "failure": "exit 5"}.get(way, "wait; sleep 600")
    job = JobSpec((0, 1), (1, 2), ("sh", "-c", f"{begin}; {then}"), ("sh", "-c", forever))
    write_spec(tmp_path / "lab.json", LabSpec(3, 10**9, jobs=(job,)))
    launcher = subprocess.Popen(
        command_line("lab", "--file", tmp_path / "lab.json"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    held.wait_for(4)
    if way == "interrupt":
        launcher.send_signal(signal.SIGINT)
    elif way == "kill":
        launcher.kill()
    held.wait_for_end()
    assert launcher.wait(LIMIT_SECONDS) == {"success": 0, "failure": 5, "interrupt": 130, "kill": -9}[way]
    assert socket.if_nameindex() == interfaces


@pytest.mark.extra
def test_an_emulated_job_learns_through_servers_what_it_has_to() -> None:
    pytest.importorskip("torch")
    job = JobSpec((0, 1), (2,), (sys.executable, str(HERE / "emulated_job.py"), "resnet18", "p3", "8"))
    lines = run_spec(LabSpec(3, 10**10, jobs=(job,), scale=0.02), str(HERE / "emulated_job.py"))
    report = json.loads(lines[-1])
    profile = zoo.profile("resnet18").scaled(0.02)
    # sums of gradients are exact, and so are the parameters: -lr times the mean of the ranks' coefficients, each step
    expected = sum(
        -0.5 * sum(((7 * rank + 11 * step + 13 * tensor) % 61 - 30) / 64 for rank in range(2) for step in range(8)) / 2
        * (entry.spec.size_bytes // 4)
        for tensor, entry in enumerate(profile.tensors)
    )  # fmt: skip
    assert report["total"] == expected
    assert report["step_ms"] > 0.95 * report["compute_ms"]


def test_jobs_share_hosts_without_meeting(tmp_path: Path) -> None:
    command = write_environment(tmp_path)
    jobs = (
        JobSpec((0, 1), command=command, name="one", environment={"MINE": "1"}),
        JobSpec((1, 2, 1), command=command, name="two"),
    )
    assert lab.execute(LabSpec(3, jobs=jobs), timeout=LIMIT_SECONDS).exit_codes == (0, 0, 0, 0, 0)
    seen = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    names = ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert {name: [environment[key] for key in names] for name, environment in seen.items()} == {
        "worker-29500-0": ["10.77.0.1", "2", "0", "1", "0"],
        "worker-29500-1": ["10.77.0.1", "2", "0", "1", "1"],
        "worker-29501-0": ["10.77.0.2", "3", "0", "2", "0"],
        "worker-29501-1": ["10.77.0.2", "3", "0", "1", "1"],
        "worker-29501-2": ["10.77.0.2", "3", "1", "2", "0"],
    }
    assert seen["worker-29500-1"]["MINE"] == "1"
    assert "MINE" not in seen["worker-29501-0"]


def test_the_failing_job_is_named() -> None:
    outcome = lab.execute(
        LabSpec(2, jobs=(
            JobSpec((0,), command=("sh", "-c", "sleep 600")),
            JobSpec((0, 1), command=("sh", "-c", "test $RANK = 0 || exit 7"), name="bad"),
        )),
        grace=0,
    )  # fmt: skip
    assert (outcome.exit_code, outcome.first_failed_rank, outcome.exit_codes) == (7, 2, (143, 0, 7))


def goodput(spec: LabSpec) -> list[float]:
    """What ranks 0 and 1 received of one another at once, in Mbit/s of the link; the best of two runs, since the
    machine may be busy with other tests."""
    best = [0.0, 0.0]
    for _ in range(2):
        done = run_spec(spec, str(HERE / "goodput.py"), "1")
        got = [int(line.removeprefix("[1] ")) / PAYLOAD_SHARE / 1e6 for line in sorted(done, key=lambda line: line[0] == "[")]
        best = [max(before, now) for before, now in zip(best, got, strict=True)]
    return best


def run_spec(spec: LabSpec, *arguments: str, samples: Path | None = None) -> list[str]:
    program = f"""
import sys
import msgspec
from gradlane.lab import LabSpec, run
spec = msgspec.json.decode(sys.argv[1], type=LabSpec)
sys.exit(run(spec, [sys.executable, *sys.argv[3:]], timeout={LIMIT_SECONDS}, samples=sys.argv[2] or None))
"""
    command = [*python(program), msgspec.json.encode(spec).decode(), str(samples or ""), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS + 20, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.timing
def test_a_host_may_have_rates_of_its_own_each_way_and_all_rates_scale() -> None:
    unlike = (HostSpec(0, up=Link(400 * MBIT)), HostSpec(1, up=Link(100 * MBIT)))
    at_0, at_1 = goodput(LabSpec(2, 800_000_000, unlike=unlike, scale=0.5))
    assert 45 < at_0 < 52.5
    assert 180 < at_1 < 210


@pytest.mark.timing
def test_the_urgent_class_keeps_its_rate_beside_one_that_would_take_it_all() -> None:
    rate = 200_000_000
    arguments = str(80 * MBIT), str(type_of_service(0)), "1"
    shares = []
    for _ in range(3):
        line = run_spec(LabSpec(3, rate, network_classes=2), str(HERE / "classes.py"), *arguments)[0]
        got = json.loads(line)
        assert got["alone"] < 84e6
        shares.append(got["beside"] / got["alone"])
        assert got["other"] > 60e6
        if shares[-1] > 0.95:
            return
    pytest.fail(f"of its rate the urgent class kept {shares}")


@pytest.mark.timing
def test_rates_change_when_the_schedule_says(tmp_path: Path) -> None:
    link = Link(50 * MBIT, (RateStep(3_000_000_000, 200 * MBIT), RateStep(4_500_000_000, 100 * MBIT)))
    path = tmp_path / "samples"
    spec = LabSpec(2, 10**9, unlike=(HostSpec(1, up=link),))
    run_spec(spec, str(HERE / "goodput.py"), "6", samples=path)
    samples = read_samples(path)
    rates = [rate / MBIT for rate in rates_up(samples, 1)]

    def between(begin_s: float, end_s: float) -> list[float]:
        began_ns = samples[0].at_ns
        return [rate for rate, at in zip(rates, samples, strict=False) if begin_s < (at.at_ns - began_ns) / 1e9 < end_s]

    # ranks take a while to start, up to three seconds on a busy machine, and are there for six; TCP takes its time, too
    assert 40 < fast_of(between(0, 2.8)) < 60
    assert 120 < fast_of(between(3.2, 4.3)) < 230
    assert 70 < fast_of(between(4.7, 5.8)) < 115


def rates_up(samples: list[Sample], host: int) -> list[float]:
    """Bytes per second from a host, between each two samples."""
    return [
        (after.up[host].passed_bytes - before.up[host].passed_bytes) * 1e9 / (after.at_ns - before.at_ns)
        for before, after in itertools.pairwise(samples)
    ]


def median_of_busy(rates: list[float]) -> float:
    busy = sorted(rate for rate in rates if rate > 1)
    return busy[len(busy) // 2]


def fast_of(rates: list[float]) -> float:
    """What one in ten is above."""
    return sorted(rates)[len(rates) * 9 // 10]


@pytest.mark.timing
def test_samples_tell_what_waits_and_what_has_passed(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    run_spec(LabSpec(2, 100_000_000), str(HERE / "goodput.py"), "1", samples=path)
    samples = read_samples(path)
    assert len(samples) > 10
    assert all(b.up[0].passed_bytes >= a.up[0].passed_bytes for a, b in itertools.pairwise(samples))
    # 12.5 MB a second; what left host 0 came to host 1
    assert 9e6 < samples[-1].up[0].passed_bytes < 25e6
    assert abs(samples[-1].up[0].passed_bytes - samples[-1].down[1].passed_bytes) < 500_000
    assert max(sample.up[0].queued_bytes for sample in samples) > 10_000


def test_samples_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for spec, path in ((LabSpec(1), tmp_path / "samples"), (LabSpec(1, 10**9), tmp_path / "no" / "samples")):
        with pytest.raises(InputError, match=r"lab samples: got .* expected"):
            lab.run(spec, ["true"], samples=path)


@pytest.mark.timing
def test_other_traffic_takes_its_rate_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    flows = (Flow(0, 1, 40 * MBIT), Flow(1, 2, 80 * MBIT, end_ns=0))
    spec = LabSpec(3, 10**9, traffic=flows, scale=0.5)
    run_spec(spec, "-c", "import time; time.sleep(2)", samples=path)
    rates = rates_up(read_samples(path), 0)
    assert 15 < median_of_busy([rate / MBIT for rate in rates]) < 25
    assert read_samples(path)[-1].up[1].passed_bytes < 3_000_000  # acknowledgements


def test_a_simulated_cluster_becomes_a_lab() -> None:
    slow = Link(20 * MBIT, (RateStep(5, 30 * MBIT),))
    fast = Link(100 * MBIT)
    hosts = (Host(fast, fast), Host(slow, fast), Host(fast, slow))
    cluster = Cluster(hosts, (Worker(0), Worker(1, 150)), (Server(2),), network_classes=3)
    spec = LabSpec.of_cluster(cluster, scale=0.5)
    assert spec.links(1) == (Link(10 * MBIT, (RateStep(5, 15 * MBIT),)), Link(50 * MBIT))
    assert spec.links(2) == (Link(50 * MBIT), Link(10 * MBIT, (RateStep(5, 15 * MBIT),)))
    assert [spec.compute_percent(host) for host in range(3)] == [100, 150, 100]
    assert (spec.network_classes, spec.jobs) == (3, (JobSpec((0, 1), (2,)),))


def test_doctor_says_that_a_lab_works_where_one_does() -> None:
    done = subprocess.run(
        command_line("lab", "doctor", "--json"),
        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["works"] is True
    works = {finding["name"]: finding["works"] for finding in report["findings"]}
    assert works["HTB, bfifo"]
    assert len(works) > 15


def test_doctor_names_what_is_missing(tmp_path: Path) -> None:
    """No user namespace can be made in a user namespace that allows none."""
    program = """
import sys
from pathlib import Path
from gradlane.lab import kernel
kernel.become_root_of_new_user_namespace(0)
Path("/proc/sys/user/max_user_namespaces").write_text("0")
from gradlane.cli import main
main(["lab", "doctor", "--json"])
"""
    done = subprocess.run(python(program), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if "max_user_namespaces" in done.stderr:
        pytest.skip("here /proc/sys/user cannot be written")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["works"] is False
    assert [finding["name"] for finding in report["findings"] if finding["needed"] and not finding["works"]] == [
        "user, PID, mount and network namespaces"
    ]


@pytest.mark.timing
def test_a_packet_is_delayed_by_each_link_that_it_crosses(capfd: pytest.CaptureFixture[str]) -> None:
    spec = LabSpec(2, 10**8, delay_ns=5_000_000, unlike=(HostSpec(1, delay_ns=2_000_000),))
    assert lab.execute(spec, (sys.executable, str(HERE / "datagrams.py"), "20", "1000"), timeout=LIMIT_SECONDS).exit_code == 0
    back, shortest_ns = map(int, capfd.readouterr().out.replace("[1]", "").split())
    assert back == 20
    assert 14_000_000 <= shortest_ns < 1_000_000_000  # there and back, over both links


def test_as_many_packets_are_lost_as_was_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    spec = LabSpec(2, 10**8, unlike=(HostSpec(1, loss_ppm=100_000),))
    assert lab.execute(spec, (sys.executable, str(HERE / "datagrams.py"), "400", "50"), timeout=LIMIT_SECONDS).exit_code == 0
    back, _ = map(int, capfd.readouterr().out.replace("[1]", "").split())
    assert 0.7 <= back / 400 <= 0.87  # 0.81 there and back, over one link; on a busy machine some come late


def test_delay_and_loss_have_bounds() -> None:
    with pytest.raises(InputError, match="loss_ppm: got 1000000, expected"):
        LabSpec(2, loss_ppm=1_000_000)
    with pytest.raises(InputError, match="delay_ns: got -1, expected"):
        HostSpec(0, delay_ns=-1)
