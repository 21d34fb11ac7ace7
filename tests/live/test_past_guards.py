"""Torch is asked itself which of its functions read a parameter past its guard; there may be others in another release."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_S = 400


@pytest.mark.extra
def test_no_function_of_torch_but_one_reads_a_guarded_parameter():
    ran = subprocess.run(
        [sys.executable, "-m", "tests.live.past_guards"], stdout=subprocess.PIPE, check=True, timeout=LIMIT_S, text=True
    )
    # it is a type of C's, which no other can take the place of; docs/training.md says so
    assert json.loads(ran.stdout) == ["torch.FloatTensor"]
