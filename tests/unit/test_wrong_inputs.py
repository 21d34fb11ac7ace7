"""Every wrong input has one line that says where it stands, what was got, and what was expected or what to do."""

from __future__ import annotations

import pytest

from tests.wrong_inputs import check, make_folder, rows

WITHOUT_TORCH = [row for row in rows() if not row[0].startswith("launch")]


@pytest.fixture
def readers_folder(tmp_path, monkeypatch):
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_there_are_two_hundred_and_each_is_there_once():
    commands = [command for command, _ in rows()]
    assert len(commands) == len(set(commands)) > 200


@pytest.mark.parametrize(("command", "said"), WITHOUT_TORCH, ids=[command for command, _ in WITHOUT_TORCH])
def test_a_wrong_input_is_refused_in_one_line(readers_folder, command, said):
    check(command, said)


@pytest.mark.parametrize(("command", "said"), list(rows()), ids=[command for command, _ in rows()])
def test_the_line_says_what_was_got_and_what_helps(command, said):
    assert "got " in said or "cannot carry out" in said or "needs gradlane's own transport" in said
    assert any(word in said for word in ("expected", "see ", "give another", "cannot carry", "...")), said
