"""bench.goodput where iperf3 answers with an error."""

from __future__ import annotations

import json
import subprocess

import pytest

from bench.goodput import fault_of, show


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (0, '{"end": {}}', "", None),
        (0, '{"end": {}, "error": "control socket has closed"}', "", "control socket has closed"),
        (1, '{"error": "unable to connect"}', "", "unable to connect"),
        (1, "", "iperf3: unrecognized option\n--bidir\n", "iperf3: unrecognized option --bidir"),
        (1, "", "", "exit code 1"),
    ],
)
def test_an_error_of_iperf3_is_one_line(code: int, out: str, err: str, fault: str | None) -> None:
    assert fault_of(subprocess.CompletedProcess([], code, out, err)) == fault


@pytest.mark.parametrize(("turns", "of_iperf"), [([None, None], "-"), ([None, [2.0, 1.0, 0.5]], "50%")])
def test_what_iperf3_did_not_measure_is_left_out(
    turns: list[list[float] | None], of_iperf: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"iperf3 --bidir": turns, "ours": [[0.5, 0.0, 1.0], [0.5, 0.0, 1.0]]}
    said = {"iperf3 --bidir": [0.0, 0.0], "ours": [1.0, 1.0]}
    show(["CPU " + json.dumps(said), "GOT " + json.dumps({"link": "loopback", "arms": arms})])
    ours = capsys.readouterr().out.splitlines()[-1].split()
    assert ours == ["ours", "4.000", "(4.000..4.000)", of_iperf, "2.00"]
