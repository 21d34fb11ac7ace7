"""The C++ tests, built and run as a person would who has no Python: configure, build, ctest. One case a program."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.extra

SOURCE = Path(__file__).parents[2] / "native"
BUILD = Path(__file__).parents[2] / "build" / "tests"
PROGRAMS = sorted(path.stem for path in [*SOURCE.glob("tests/*_test.cc"), *SOURCE.glob("fuzz/*_fuzz.cc")])

ONE_MAPPING = "one_mapping_test"  # node_shared_test, for a thread sanitizer; ctest names those of its tests that it runs


@pytest.fixture(scope="session")
def built() -> Path:
    cmake = shutil.which("cmake")
    if cmake is None or not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no cmake or no C++ compiler here")
    # what takes time here is compiling: as it ships, fully optimised, the same code is tested from Python
    quickly = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1", "-DCMAKE_UNITY_BUILD=ON"]
    configure = [cmake, "-S", str(SOURCE), "-B", str(BUILD), *quickly]
    for command in (configure, [cmake, "--build", str(BUILD), "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return BUILD


def test_ctest_knows_every_program(built):
    listed = subprocess.run(
        ["ctest", "--test-dir", str(built), "--show-only=json-v1"], capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(test["name"] for test in json.loads(listed.stdout)["tests"]) == sorted([*PROGRAMS, ONE_MAPPING])


def test_ranks_of_a_host_may_share_one_mapping(built):
    command = ["ctest", "--test-dir", str(built), "--output-on-failure", "-R", f"^{ONE_MAPPING}$"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(built, program):
    done = subprocess.run([str(built / program)], cwd=built, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
