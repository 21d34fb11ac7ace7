"""A wheel as a user installs it: `python -m tests.installed_wheel WHEEL` in a new environment, with no compiler in reach.

Run by `make wheel`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

COMMAND = ("plan", "vgg16", "--rate", "10gbit", "--workers", "16")
SECONDS = 5
"""What the first run of COMMAND may take of a processor; on a busy machine it takes longer by the clock."""


def check(wheel: Path) -> None:
    """Install `wheel` and run it; raises if something is missing, too much or too slow."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        only = {"PATH": f"{folder}/bin", "HOME": folder}

        def run(*arguments: str) -> str:
            done = subprocess.run(arguments, cwd=folder, env=only, stdout=subprocess.PIPE, text=True, check=True)
            return done.stdout

        run(f"{folder}/bin/pip", "install", "--quiet", "--only-binary", ":all:", str(wheel.resolve()))
        before_s = used_s()
        printed = run(f"{folder}/bin/gradlane", *COMMAND)
        took_s = used_s() - before_s
        assert "no schedule is faster than" in printed, printed
        assert took_s <= SECONDS, f"the first `gradlane {' '.join(COMMAND)}` took {took_s:.1f} s, expected at most {SECONDS} s"
        installed = [line.split("==")[0] for line in run(f"{folder}/bin/pip", "freeze").splitlines()]
        assert "torch" not in installed, f"without the extra `torch`, got {', '.join(installed)}"
        package = Path(run(f"{folder}/bin/python", "-c", "import gradlane; print(gradlane.__path__[0])").strip())
        assert (package / "py.typed").exists()
        print(
            f"{wheel.name}: installed with {len(installed) - 1} others, first `gradlane plan` in {took_s:.1f} s of a processor"
        )


def used_s() -> float:
    """Processor time of all children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    for each in sys.argv[1:]:
        check(Path(each))
