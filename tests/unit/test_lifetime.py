"""What a process starts ends with it, and its temporary folder goes, however it ends."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradlane.lifetime import Children, Interrupted, held, interruptible, scratch_folder

LIMIT_S = 60

# a command that has a folder and a child, and says so when both are there
COMMAND = """
import signal, sys
from gradlane.lifetime import Children, scratch_folder
with scratch_folder() as folder, Children() as children:
    open(folder + "/file", "w").close()
    child = children.start([sys.executable, "-c", sys.argv[1]], stdout=2)
    print(folder, flush=True)
    signal.pause()
"""
WAITS = "import signal; print('up', flush=True); signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"


class Started:
    """`COMMAND` with a child, when both run; killed with the block."""

    def __init__(self, child: str) -> None:
        arguments = [sys.executable, "-c", COMMAND, child]
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # tests that a shell runs in the background ignore SIGINT, and so would this
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def __enter__(self) -> Started:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.folder = Path(self.process.stdout.readline().decode().strip())
        assert self.process.stderr.readline() == b"up\n"
        self._remover = os.pidfd_open(remover_of(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._remover)
        self.process.kill()
        self.process.communicate()

    def wait(self) -> int:
        """The exit code, when the child has ended and what removes the folder has, too."""
        self.process.communicate(timeout=LIMIT_S)  # the child holds stderr open
        with selectors.DefaultSelector() as selector:
            selector.register(self._remover, selectors.EVENT_READ)
            assert selector.select(LIMIT_S)
        return self.process.returncode


def remover_of(folder: Path) -> int:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().endswith(b"\0%s\0" % os.fsencode(folder)):
                return int(entry.name)
        except OSError:  # it has ended
            continue
    raise AssertionError(f"nothing removes {folder}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGQUIT])
def test_a_child_and_a_folder_go_with_a_process_however_it_ends(number: signal.Signals) -> None:
    with Started(WAITS) as started:
        os.kill(started.process.pid, number)
        assert started.wait() != 0
        assert not started.folder.exists()


def test_the_next_signal_kills_a_child_that_does_not_end() -> None:
    with Started(DEAF) as started:
        os.kill(started.process.pid, signal.SIGTERM)
        os.kill(started.process.pid, signal.SIGINT)
        assert started.wait() != 0
        assert not started.folder.exists()


def test_a_folder_goes_with_the_block_and_with_an_exception() -> None:
    with scratch_folder() as folder:
        Path(folder, "inner").mkdir()
    assert not Path(folder).exists()
    with pytest.raises(ZeroDivisionError), scratch_folder() as folder:
        raise ZeroDivisionError
    assert not Path(folder).exists()


def test_a_rank_ends_with_the_process_that_it_is_told_of() -> None:
    program = "from gradlane.lifetime import end_with_starter; end_with_starter(); print('goes on')"
    for starter, code, said in ((os.getpid(), 0, "goes on\n"), (1, 128 + signal.SIGKILL, "")):
        environment = {**os.environ, "GRADLANE_STARTED_BY": str(starter)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, said)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C as Python has it by itself, whatever the parent of this process has left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_a_signal_is_put_off_and_comes_once() -> None:
    steps = []

    def work() -> None:
        with held(), held():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("whole")
        steps.append("not reached")

    with interruptible(), pytest.raises(Interrupted) as raised:
        work()
    assert raised.value.number == signal.SIGTERM
    assert steps == ["whole"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), held():
        os.kill(os.getpid(), signal.SIGINT)
    with held():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_is_not_lost_beside_an_error() -> None:
    def work() -> None:
        with held():
            os.kill(os.getpid(), signal.SIGINT)
            raise OSError("a program that is not there")

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert isinstance(raised.value.__context__, OSError)


def test_signals_that_are_ignored_or_handled_stay_so() -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_children_end_with_the_block() -> None:
    with Children() as children:
        child = children.start([sys.executable, "-c", WAITS], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
    assert child.returncode == -signal.SIGTERM
    child.stdout.close()


class _Dropping:
    """Whatever is raised while it goes, Python drops."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(10))  # the handler runs between two instructions


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_started_after_an_interrupt_that_python_dropped() -> None:
    with interruptible(), Children() as children:
        _Dropping()
        with pytest.raises(Interrupted):
            children.start([sys.executable, "-c", "pass"])
    with interruptible(), Children() as children:
        children.start([sys.executable, "-c", "pass"]).wait()
