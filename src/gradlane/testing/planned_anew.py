"""Makes plans of a policy in another interpreter, which has another seed for the hashes of strings.

`check_policy` runs this file as a program. Its standard input is a pickled `Request`, its output the plans' fingerprints.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from gradlane.core.network import Network
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile

_LIMIT_S = 120.0
_MAIN = "__mp_main__"  # of a script, as `multiprocessing` has it: what it does as a program is left out


class Request(NamedTuple):
    """What to plan.

    Attributes:
        path: the modules are found by it.
        module, file: of the policy's class; the file is None for a module without one.
        policy: pickled.
        cases: what to plan, each with its network.
    """

    path: list[str]
    module: str
    file: str | None
    policy: bytes
    cases: Sequence[tuple[Profile, Network]]


def fingerprints(policy: Policy, cases: Sequence[tuple[Profile, Network]]) -> list[str] | None:
    """The fingerprints of the plans that another interpreter makes; None for a class that no other interpreter can import.

    Raises:
        RuntimeError: that interpreter has failed; with the last line that it printed.
    """
    module = type(policy).__module__
    file = getattr(sys.modules[module], "__file__", None)
    try:
        request = Request(sys.path, module, file, pickle.dumps(policy), cases)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps(tuple(request)),
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1])
    return done.stdout.decode().split()


def _import(module: str, file: str | None) -> None:
    """Have the module in `sys.modules`, from its file if it cannot be imported by its name."""
    if module != "__main__":
        try:
            importlib.import_module(module)
            return
        except ImportError:
            if file is None:
                raise
    spec = importlib.util.spec_from_file_location(_MAIN if module == "__main__" else module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[spec.name] = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)


def _main() -> None:
    request = Request(*pickle.load(sys.stdin.buffer))
    sys.path[:] = request.path
    with contextlib.redirect_stdout(sys.stderr):  # the policy's module may print
        _import(request.module, request.file)
        policy: Policy = pickle.loads(request.policy)
        found = [policy.plan(profile, network).fingerprint for profile, network in request.cases]
    print(*found)


if __name__ == "__main__":
    _main()
