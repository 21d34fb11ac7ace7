"""Commands that are ended by a signal, at any moment: what they leave.

    python -m tests.live.endings                             Ctrl-C at every 10 ms of the first three seconds, each command
    python -m tests.live.endings --step-ms 50 launch lab     at every 50 ms, two of them
    python -m tests.live.endings --signal SIGKILL --until-ms 6000 --step-ms 500

Prints what was not right, and how many moments there were.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.commands import command_line

LIMIT_S = 60
"""How long a command may take to end, and a rank to start: long for a busy machine."""
SCRIPT = "import signal\nsignal.pause()\n"
COMMANDS: dict[str, list[str]] = {
    "advise": ["advise", "SCRIPT"],
    "compare in a lab": ["compare", "resnet18", "--link", "10gbit", "--scale", "0.02"],
    "compare on loopback": ["compare", "resnet18", "--loopback", "--scale", "0.02"],
    "lab": ["lab", "--hosts", "2", "--link", "1gbit", "--", sys.executable, "SCRIPT"],
    "launch": ["launch", "--nproc", "2", "--report", "report.html", "SCRIPT"],
    "launch with servers": ["launch", "--backend", "server", "--servers", "1", "SCRIPT"],
    "probe in a lab": ["probe", "--link", "1gbit", "--seconds", "60"],
    "probe on loopback": ["probe", "--seconds", "60"],
    "profile": ["profile", "--nproc", "2", "SCRIPT"],
}
NEEDS_LAB = ("compare in a lab", "lab", "probe in a lab")
# run by each Python that a command starts: it holds the pipe open until it ends, and ranks say that they are there
_SITE = """
import os
held = os.open(os.environ["ENDINGS_HELD"], os.O_WRONLY)
if "RANK" in os.environ:
    os.write(held, b"rank")
"""


class Run:
    """A command in a session of its own, with a temporary folder of its own.

    Args:
        name: of `COMMANDS`.
        folder: empty.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        (folder / "sitecustomize.py").write_text(_SITE)
        script, held = folder / "waits.py", folder / "held"
        script.write_text(SCRIPT)
        os.mkfifo(held)
        self._held = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
        own = {"ENDINGS_HELD": str(held), "PYTHONPATH": str(folder), "TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1"}
        self._mark = f"ENDINGS_HELD={held}\0".encode()
        self.process = subprocess.Popen(
            command_line(*(str(script) if word == "SCRIPT" else word for word in COMMANDS[name])),
            cwd=folder,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # what a shell starts in the background ignores SIGINT, and so would these
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._marked():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        os.close(self._held)

    def wait_for_a_rank(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._held, selectors.EVENT_READ)
            assert selector.select(LIMIT_S), "no rank was started"

    def end(self, number: signal.Signals) -> str:
        """Send a signal: SIGINT to all, as a terminal does, others to the command. Then all have to end.

        Returns:
            What is wrong, or "".
        """
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid, number)
        try:
            # each process of the command has these streams: their end is the end of the last
            errors = self.process.communicate(timeout=LIMIT_S)[1]
        except subprocess.TimeoutExpired:
            return f"not ended after {LIMIT_S} s: {self._marked()}"
        # 1 is how Python answers a Ctrl-C while it is itself being started
        early = number == signal.SIGINT and self.process.returncode == 1 and errors.endswith("KeyboardInterrupt\n")
        if self.process.returncode not in (-number, 128 + number) and not early:
            return f"exit code {self.process.returncode}, expected {-number} or {128 + number}: {errors[-2000:]}"
        if not self._let_go():
            return f"left running: {self._marked()}"
        for pid in self._marked():  # what removes folders
            self._wait_for(pid)
        # torch's cache of compiled code is meant to stay
        left = [each.name for each in self._temporary.iterdir() if not each.name.startswith("torchinductor_")]
        return f"left in TMPDIR: {left}" if left else ""

    def _let_go(self) -> bool:
        """Whether every Python ends, soon."""
        deadline = time.monotonic() + LIMIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._held, selectors.EVENT_READ)
            while selector.select(max(deadline - time.monotonic(), 0)):
                if not os.read(self._held, 1 << 10):
                    return True
        return not self._marked()

    def _wait_for(self, pid: int) -> None:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            selector.select(LIMIT_S)
        os.close(ended)

    def _marked(self) -> dict[int, str]:
        """The processes of this run, and their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found


def ended_after(name: str, moment_s: float, number: signal.Signals) -> str:
    """Start a command and end it at a moment of its life; returns what is wrong, or ""."""
    with tempfile.TemporaryDirectory(prefix="endings-") as folder, Run(name, Path(folder)) as run:
        time.sleep(moment_s)  # the moment is what is tried
        return run.end(number)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.live.endings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="*", default=list(COMMANDS), metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("--step-ms", type=int, default=10)
    parser.add_argument("--from-ms", type=int, default=0)
    parser.add_argument("--until-ms", type=int, default=3000)
    parser.add_argument("--signal", default="SIGINT", choices=["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
    options = parser.parse_args()
    wrong = Counter[str]()
    for name in options.commands:
        moments = range(options.from_ms, options.until_ms, options.step_ms)
        for moment in moments:
            found = ended_after(name, moment / 1e3, signal.Signals[options.signal])
            if found:
                wrong[name] += 1
                print(f"{name} at {moment} ms: {found}", flush=True)
        print(f"{name}: {options.signal} at {len(moments)} moments, {wrong[name]} of them wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
