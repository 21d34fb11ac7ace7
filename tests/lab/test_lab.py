"""A lab, as its users see it: real namespaces, real processes, each test a few seconds at most."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gradlane import lab
from gradlane.errors import InputError
from gradlane.lab import LabSpec, awake
from tests.commands import command_line

HERE = Path(__file__).parent
LIMIT_SECONDS = 20
# payload bytes in a full frame of 1514: less IP and TCP headers with timestamps, and Ethernet's
PAYLOAD_SHARE = 1448 / 1514


@pytest.fixture(scope="module", autouse=True)
def _lab_is_supported() -> None:
    reason = lab.supported()
    if reason is not None:
        pytest.skip(reason)


def run_lab(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = command_line("lab", "--quiet", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, **options)  # type: ignore[call-overload,no-any-return]


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_ranks_see_torchruns_environment_and_the_labs(tmp_path: Path) -> None:
    program = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w'))"
    lab.run(LabSpec(3, 200_000_000), python(program), env={"PATH": os.environ["PATH"], "MINE": "kept", "RANK": "9"})
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [[environment[name] for name in names] for environment in seen] == [
        ["0", "0", "0", "3", "1", "10.77.0.1", "29500"],
        ["1", "1", "0", "3", "1", "10.77.0.1", "29500"],
        ["2", "2", "0", "3", "1", "10.77.0.1", "29500"],
    ]
    names = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "GRADLANE_LAB", "GRADLANE_LAB_LINK", "MINE")
    assert [seen[2][name] for name in names] == ["eth0", "1", "1", "200000000", "kept"]


def test_a_rank_is_alone_on_its_host_and_reaches_the_others(tmp_path: Path) -> None:
    program = f"""
import json, os, socket
rank = int(os.environ["RANK"])
names = [name for _, name in socket.if_nameindex()]
own = os.stat("/proc/self/ns/net").st_ino
with socket.create_server((socket.gethostname(), 7000)) as server:
    server.settimeout({LIMIT_SECONDS})
    heard = []
    for other in range(3):  # in turn each calls all, once all listen: rank 0 first hears from the others
        if other == rank:
            continue
        while True:
            try:
                socket.create_connection((f"10.77.0.{{other + 1}}", 7000), {LIMIT_SECONDS}).sendall(bytes([rank]))
                break
            except ConnectionRefusedError:
                pass
    for _ in range(2):
        connection, (address, _) = server.accept()
        heard.append([connection.recv(1)[0], address])
json.dump([names, own, sorted(heard)], open({str(tmp_path)!r} + "/" + str(rank), "w"))
"""
    assert lab.run(LabSpec(3), python(program), timeout=LIMIT_SECONDS) == 0
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    everyone = [[0, "10.77.0.1"], [1, "10.77.0.2"], [2, "10.77.0.3"]]
    for rank, (names, _, heard) in enumerate(seen):
        assert names == ["lo", "eth0"]
        assert heard == everyone[:rank] + everyone[rank + 1 :]
    namespaces = {own for _, own, _ in seen} | {os.stat("/proc/self/ns/net").st_ino}
    assert len(namespaces) == 4


@pytest.mark.skipif(not os.access(awake.LATENCY, os.W_OK), reason="only root may ask that processors stay awake")
def test_processors_stay_awake_while_a_lab_of_root_runs() -> None:
    program = f"""
import os, struct
print(*struct.unpack("i", os.read(os.open({awake.LATENCY!r}, os.O_RDONLY), 4)))
"""

    def asked_us() -> int:
        done = subprocess.run(python(program), capture_output=True, text=True, check=True)
        return int(done.stdout)

    before = asked_us()
    if before == 0:
        pytest.skip("somebody else keeps processors awake")
    assert int(run_lab("--hosts", "1", *python(program)).stdout) == 0
    assert asked_us() == before


@pytest.mark.timing
def test_a_link_keeps_its_rate_both_ways_at_once() -> None:
    # the machine may be busy with other tests just then: the best of three counts
    least = 0.95 if os.access(awake.LATENCY, os.W_OK) else 0.85  # timers of a machine that may sleep are late
    shares: list[float] = []
    for _ in range(3):
        done = run_lab("--hosts", "2", "--link", "200mbit", str(HERE / "goodput.py"), "1")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.replace("[1] ", "").split()
        shares.append(min(int(line) / PAYLOAD_SHARE / 200e6 for line in lines))
        assert max(int(line) / PAYLOAD_SHARE / 200e6 for line in lines) < 1.05
        if shares[-1] > least:
            return
    pytest.fail(f"the slower direction had these shares of the rate: {shares}")


def test_the_first_failing_rank_is_named_and_its_exit_code_returned() -> None:
    done = run_lab("--hosts", "3", "sh", "-c", "test $RANK != 1 || exit 7")
    assert done.returncode == 7
    assert "rank 1 (host1) ended with exit code 7" in done.stderr


def test_a_rank_ended_by_a_signal_counts_128_more_and_stops_the_others(held) -> None:
    outcome = lab.execute(LabSpec(2), ["sh", "-c", 'test $RANK = 0 || kill -SEGV $$; exec "$@"', "sh", *held.command], grace=0)
    assert (outcome.exit_code, outcome.first_failed_rank) == (139, 1)
    assert outcome.exit_codes == (143, 139)
    held.wait_for_end()


def test_output_of_rank_0_comes_as_it_is_and_that_of_others_with_their_rank() -> None:
    done = run_lab("--hosts", "2", "sh", "-c", "echo out $RANK; echo err $RANK >&2; test $RANK = 0 || printf unfinished")
    lines = done.stdout.splitlines()
    assert sorted(lines) == ["[1] out 1", "[1] unfinished", "out 0"]
    assert lines.index("[1] out 1") < lines.index("[1] unfinished")
    assert sorted(done.stderr.splitlines()) == ["[1] err 1", "err 0"]


def test_no_line_comes_between_two_parts_of_another(tmp_path: Path) -> None:
    # `python -u` writes a line and its end apart; rank 0 does so before, while and until rank 1 prints all of its own
    program = f"""
import os
from pathlib import Path
begun, done = Path({str(tmp_path / "begun")!r}), Path({str(tmp_path / "done")!r})
if os.environ["RANK"] == "1":
    while not begun.exists():
        pass
    for _ in range(2000):
        print("x" * 50)
    done.touch()
else:
    print("x" * 50)
    begun.touch()
    while not done.exists():
        print("x" * 50)
"""
    lines = run_lab("--hosts", "2", "--timeout", str(LIMIT_SECONDS), *python(program)).stdout.splitlines()
    assert lines.count("[1] " + "x" * 50) == 2000
    assert set(lines) == {"x" * 50, "[1] " + "x" * 50}


def test_a_last_line_without_end_stays_without_one() -> None:
    assert run_lab("--hosts", "1", "printf", "unfinished").stdout == "unfinished"


def test_time_is_up(held) -> None:
    done = run_lab("--hosts", "2", "--timeout", "0.5", *held.command)
    assert done.returncode == 124
    assert "the time of 0.5 s is up with rank 0, 1 still running" in done.stderr
    held.wait_for_end()


def test_a_killed_launcher_leaves_nothing(held) -> None:
    interfaces = socket.if_nameindex()
    launcher = subprocess.Popen(command_line("lab", "--hosts", "2", "--link", "100mbit", *held.command))
    held.wait_for(2)
    launcher.kill()
    held.wait_for_end()
    launcher.wait(LIMIT_SECONDS)
    assert socket.if_nameindex() == interfaces


def test_a_running_lab_adds_no_interface_outside(held) -> None:
    interfaces = socket.if_nameindex()
    launcher = subprocess.Popen(command_line("lab", "--hosts", "2", *held.command))
    held.wait_for(2)
    assert socket.if_nameindex() == interfaces
    launcher.kill()
    held.wait_for_end()
    launcher.wait(LIMIT_SECONDS)


@pytest.mark.parametrize("whole_group", [True, False], ids=["by the terminal", "by kill"])
def test_an_interrupt_ends_all_with_130(held, whole_group: bool) -> None:
    # a job started in the background of a shell ignores SIGINT, and so would the launcher
    launcher = subprocess.Popen(
        command_line("lab", "--hosts", "2", *held.command),
        start_new_session=True,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    held.wait_for(2)
    (os.killpg if whole_group else os.kill)(launcher.pid, signal.SIGINT)
    said = launcher.communicate(timeout=LIMIT_SECONDS)[1].decode()
    assert launcher.returncode == 130, said
    assert said.endswith("gradlane lab: interrupted; ending all ranks\n")
    held.wait_for_end()


def test_a_command_that_is_not_there_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"got 'no-such-program', which is not a program that can be run"):
        lab.run(LabSpec(2), ["no-such-program"])
    assert run_lab("no-such-program").returncode == 2


def test_a_program_that_the_kernel_cannot_run_is_an_input_error(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF and nothing more")
    program.chmod(0o755)
    with pytest.raises(InputError, match="cannot be run"):
        lab.run(LabSpec(2), [str(program)])


@pytest.mark.parametrize("spec", [{"hosts": 0}, {"hosts": 65}, {"hosts": 2, "link_bits_per_second": 1}])
def test_a_lab_that_cannot_be_is_refused(spec: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected"):
        LabSpec(**spec)


def test_options_of_the_command_are_its_own_and_json_sums_up() -> None:
    done = run_lab("--hosts", "2", "--link", "1gbit", "--json", "--", "sh", "-c", "exit 0", "--hosts", "5")
    report = json.loads(done.stdout)
    assert [report[name] for name in ("hosts", "link_bits_per_second", "exit_code", "exit_codes")] == [2, 10**9, 0, [0, 0]]


def on_a_strict_machine(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the innermost user namespace that the kernel makes: the errors of a strict machine, for real."""
    strict = """
from contextlib import suppress
from pathlib import Path
from gradlane.errors import LabError
from gradlane.lab import kernel
with suppress(LabError):
    while True:
        kernel.become_root_of_new_user_namespace(0)
"""
    return subprocess.run(python(strict + program), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


@pytest.mark.parametrize(("options", "record"), [([], "comparison.json"), (["alexnet", "--scale", "0.01"], "sweep.json")])
def test_a_comparison_without_a_lab_leaves_what_an_earlier_one_left(tmp_path: Path, options: list[str], record: str) -> None:
    earlier = tmp_path / record
    earlier.write_text("of an earlier run")
    done = on_a_strict_machine(f"from gradlane.cli import main; main({['compare', *options, '--out', str(tmp_path)]!r})")
    assert "no lab can be made here" in done.stderr
    assert earlier.exists()


def test_what_the_kernel_refuses_is_named(tmp_path: Path) -> None:
    program = f"""
from gradlane import lab
Path({str(tmp_path)!r}, "reason").write_text(str(lab.supported()))
"""
    done = on_a_strict_machine(program)
    assert done.returncode == 0, done.stderr
    reason = (tmp_path / "reason").read_text()
    assert reason.startswith("the kernel refused unshare(new user, PID, mount, network namespace) (")
    assert "errno 28" in reason
    assert "gradlane launch" in reason


def test_an_ordinary_user_needs_no_root(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests have just shown it: they run as an ordinary user")
    nobody = 65534
    search = os.pathsep.join(path for path in sys.path if path)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"user": nobody, "group": nobody, "extra_groups": [], "env": environment, "cwd": "/"}
    options |= {"capture_output": True, "text": True, "timeout": LIMIT_SECONDS, "check": False}
    # a virtual environment in a private home is closed to others; the system's Python may serve
    for interpreter in (sys.executable, shutil.which("python3", path="/usr/bin")):
        try:
            can_import = subprocess.run([interpreter, "-c", "import gradlane.lab, pyroute2, msgspec"], **options)
        except OSError:
            continue
        if can_import.returncode == 0:
            break
    else:
        pytest.skip(f"uid {nobody} can read no Python with gradlane and its libraries")
    program = "from gradlane.lab import *; print(execute(LabSpec(2, 10**8), ['sh', '-c', 'exit $RANK']).exit_codes)"
    done = subprocess.run([interpreter, "-c", program], **options)
    assert done.stdout == "(0, 1)\n", done.stderr
