from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from gradlane.live.session.console import ONCE, use_console


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger `gradlane`, of which the script says nothing."""
    logger = logging.getLogger("gradlane")
    before, level = (logger.handlers[:], logger.propagate), logger.level
    logger.handlers[:], logger.propagate = [], True
    yield logger
    logger.handlers[:], logger.propagate = before
    logger.setLevel(level)


def test_a_warning_is_printed_as_it_is_and_others_as_the_script_prints_its_own(logger, capsys, monkeypatch):
    theirs = logging.StreamHandler(io.StringIO())
    theirs.setFormatter(logging.Formatter("script: %(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [theirs])
    logger.setLevel(logging.INFO)  # which also drops what it remembers of its levels
    use_console()
    use_console()  # by each model
    logger.warning("gradlane: %s", "the barrier is kept")
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    logger.info("rank 0: a plan")
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    logger.info("rank 0: another plan")
    assert capsys.readouterr().err == "gradlane: the barrier is kept\n"
    assert theirs.stream.getvalue() == "script: rank 0: a plan\n"


def test_what_several_sessions_say_is_printed_once_and_what_recurs_each_time(logger, capsys):
    use_console()
    for text in ("a", "b", "a"):
        logger.warning(text, extra=ONCE)
    for text in ("c", "c"):
        logger.warning(text)
    assert capsys.readouterr().err.split() == ["a", "b", "c", "c"]


def test_a_script_that_gives_the_logger_a_handler_gets_all_lines_there(logger, capsys):
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger.addHandler(Kept())
    logger.propagate = False
    use_console()
    for _ in range(2):
        logger.warning("said", extra=ONCE)
    assert (lines, capsys.readouterr().err) == (["said", "said"], "")


def test_a_line_is_above_the_progress_bar_that_is_under_way(logger, capsys):
    tqdm = pytest.importorskip("tqdm").tqdm
    use_console()
    with tqdm(total=2, desc="epoch", mininterval=0) as bar:
        bar.update()
        logger.warning("gradlane: said")
        bar.update()
    # a carriage return begins the bar anew; what stands on a line of its own is not part of one
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if "said" in line]
    assert lines == ["gradlane: said"]
