"""Jobs of three ranks in which one comes to harm at a named moment, and how the others end."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from gradlane.core.launch_options import LAUNCH_VARIABLE, LaunchOptions
from tests.live.script_server import SCRIPTS, ScriptServer
from tests.ports import free_port

WORLD = 3
START_S = 60.0
IMPATIENT = LaunchOptions(stall_timeout=2.5)
"""Of jobs whose ranks are stopped for good."""
ENDED = "ended"
"""What a rank on an emulated host prints, with the time, when it has closed its session."""
HARMS = ("KILL", "STOP", "TERM", "exception", "link")
BACKENDS = ("all-reduce", "server", "both")
# what torch.distributed says when its store is gone
_NOISE = re.compile(r"frame #|<omitting|Exception raised from|(\[rank\d\]:)?\[[WE]\d")
_NAMED = {"KILL": "PeerDied", "TERM": "PeerDied", "STOP": "PeerStalled", "link": "PeerStalled", "exception": "PeerFailed"}


class End(NamedTuple):
    """How a rank's process ended. after_s: seconds since the fault. error: the last line that it printed."""

    code: int
    after_s: float
    error: str


class Job:
    """The processes of one job, by rank, and what they print.

    Args:
        server: starts them.
        folder: for what they print.
        script, arguments: what each runs.
        world: how many there are.
        options: of their sessions; by default a rank that is silent for 2.5 s has failed.
    """

    def __init__(
        self,
        server: ScriptServer,
        folder: Path,
        script: str,
        world: int,
        *arguments: object,
        options: LaunchOptions = IMPATIENT,
    ) -> None:
        port = free_port()
        self._server, self._folder = server, folder
        self._pids: list[int] = []
        self._outputs: list[int] = []
        for rank in range(world):
            os.mkfifo(folder / f"out{rank}")
            self._outputs.append(os.open(folder / f"out{rank}", os.O_RDWR | os.O_NONBLOCK))
            environment = {
                "RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                LAUNCH_VARIABLE: options.to_text(),
            }  # fmt: skip
            self._pids.append(
                server.ask(
                    run=[str(SCRIPTS / script), *map(str, arguments)],
                    env={key: str(value) for key, value in environment.items()},
                    out=str(folder / f"out{rank}"),
                    err=str(folder / f"err{rank}"),
                )
            )
        self._watches = [os.pidfd_open(pid) for pid in self._pids]
        self._running = set(range(world))

    def line(self, rank: int, within_s: float = START_S) -> str:
        """What `rank` prints first. Some releases of torch print a line of Gloo's before it."""
        said = ""
        while not (own := re.sub(r"^\[Gloo\].*\n?", "", said, flags=re.MULTILINE)):
            assert select.select([self._outputs[rank]], [], [], within_s)[0], self.errors(rank)
            said += os.read(self._outputs[rank], 4096).decode()
        return own

    def printed(self, rank: int) -> str:
        """What `rank` has printed that was not read yet."""
        readable = select.select([self._outputs[rank]], [], [], 0)[0]
        return os.read(self._outputs[rank], 1 << 16).decode() if readable else ""

    def ends_silently(self, rank: int) -> bool:
        """Waits until `rank` prints something or ends: whether it ends first."""
        return select.select([self._outputs[rank], self._watches[rank]], [], [], START_S)[0] == [self._watches[rank]]

    def signal(self, rank: int, number: int) -> None:
        signal.pidfd_send_signal(self._watches[rank], number)

    def errors(self, rank: int) -> str:
        return (self._folder / f"err{rank}").read_text()

    def ends(self, ranks: list[int], within_s: float) -> list[End]:
        """How `ranks` end, all of them within that time from now."""
        ended = [end for end in self.ends_so_far(ranks, within_s) if end is not None]
        assert len(ended) == len(ranks), f"some of ranks {ranks} are still there after {within_s} s"
        return ended

    def ends_so_far(self, ranks: list[int], within_s: float, since: float | None = None) -> list[End | None]:
        """How `ranks` end.

        Args:
            ranks: those to wait for.
            within_s: seconds from now on; None for a rank that is still there then.
            since: of the monotonic clock, when the fault came; None for now.
        """
        now = time.monotonic()
        ends: dict[int, End] = {}
        while len(ends) < len(ranks):
            waited = {self._watches[rank]: rank for rank in ranks if rank not in ends}
            ended, _, _ = select.select(list(waited), [], [], max(0.0, now + within_s - time.monotonic()))
            if not ended:
                break
            for watch in ended:
                rank = waited[watch]
                self._running.discard(rank)
                after_s = time.monotonic() - (now if since is None else since)
                lines = [line.removeprefix(f"[rank{rank}]: ") for line in self.errors(rank).splitlines()]  # torch's mark
                error = ([""] + [line for line in lines if line and not _NOISE.match(line)])[-1]
                ends[rank] = End(self._server.ask(wait=self._pids[rank]), after_s, error)
        return [ends.get(rank) for rank in ranks]

    def close(self) -> None:
        for rank in self._running:
            self.signal(rank, signal.SIGKILL)
            self._server.ask(wait=self._pids[rank])
        for descriptor in (*self._watches, *self._outputs):
            os.close(descriptor)


def harmed(
    server: ScriptServer, folder: Path, phase: str, culprit: int, harm: str, backend: str, within_s: float
) -> dict[int, End | None] | None:
    """How the other ranks end after `harm` has come to `culprit` in `phase`; None if the job never comes to that phase.

    A rank that has not attached when that happens is left out.
    """
    job = Job(server, folder, "phases.py", WORLD, phase, culprit, harm, backend)
    others = [rank for rank in range(WORLD) if rank != culprit and (phase != "meeting" or rank == (0 if culprit else 1))]
    try:
        if job.ends_silently(culprit):
            (end,) = job.ends([culprit], within_s)
            assert end.code == 0, job.errors(culprit)
            return None
        since = float(job.line(culprit))
        return dict(zip(others, job.ends_so_far(others, within_s, since), strict=True))
    finally:
        job.close()


def cut_off(phase: str, culprit: int, backend: str, within_s: float) -> dict[int, End | None] | None:
    """As `harmed`, on emulated hosts, where the link of the culprit's host goes down; a rank that has raised, or has closed its
    session, has ended here.
    """
    lab = [sys.executable, "-m", "gradlane", "lab", "--quiet", "--hosts", str(WORLD), "--link", "1gbit", "--"]
    script = [sys.executable, str(SCRIPTS / "phases.py"), phase, str(culprit), "link", backend]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", LAUNCH_VARIABLE: IMPATIENT.to_text()}
    done = subprocess.run(
        [*lab, *script], env=environment, text=True, capture_output=True, check=False, timeout=START_S + within_s
    )
    said = re.findall(r"^(?:\[(\d)\] )?(\d+\.\d+)(?: (\w+) (\w+))?$", done.stdout, re.MULTILINE)
    since = [float(at) for _, at, error, _ in said if not error]
    if not since:
        assert done.returncode == 0, done.stderr
        return None
    ends = {
        int(rank or 0): End(int(error != ENDED), float(at) - since[0], f"gradlane.errors.{error}: rank {blamed}")
        for rank, at, error, blamed in said
        if error
    }
    return {rank: ends.get(rank) for rank in range(WORLD) if rank != culprit and (phase != "meeting" or rank == (not culprit))}


def misnamed(ends: dict[int, End | None], culprit: int, harm: str, phase: str) -> list[str]:
    """In words, by rank, how those ended that did not say what came to the culprit."""
    return [
        f"rank {rank}: " + ("still there" if end is None else f"exit code {end.code}, {end.error}")
        for rank, end in ends.items()
        if not is_named(end, culprit, harm, phase)
    ]


def is_named(end: End | None, culprit: int, harm: str, phase: str) -> bool:
    """Whether a rank ended with an error that says what came to the culprit; near its own end, it may have ended in order."""
    if end is None:
        return False
    if phase in ("close", "closing") and end.code == 0:
        return True
    # a rank may hear of it from another, whose verdict came first
    named = re.match(rf"gradlane\.errors\.{_NAMED[harm]}: (?:transport: )?(?:rank \d+ says: )*rank (\d+)", end.error)
    return end.code == 1 and named is not None and int(named[1]) == culprit
