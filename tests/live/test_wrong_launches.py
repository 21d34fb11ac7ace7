"""Wrong command lines of `gradlane launch`, whose options torchrun's parser reads."""

from __future__ import annotations

import pytest

from tests.wrong_inputs import check, make_folder, rows

LAUNCHES = [row for row in rows() if row[0].startswith("launch")]


@pytest.mark.parametrize(("command", "said"), LAUNCHES, ids=[command for command, _ in LAUNCHES])
def test_a_wrong_launch_is_refused_in_one_line(tmp_path, monkeypatch, command, said):
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    check(command, said)
