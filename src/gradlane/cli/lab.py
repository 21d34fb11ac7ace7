"""`gradlane lab`: run a command on every host of an emulated cluster, joined by shaped links."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from gradlane.cli import lab_doctor
from gradlane.cli.inputs import topology
from gradlane.cli.inputs.types import OUT_FILE, SECONDS
from gradlane.compare.memory import PYTHON_BYTES, need_memory
from gradlane.core import files
from gradlane.core.fields import did_you_mean
from gradlane.errors import InputError
from gradlane.lab import execute
from gradlane.lab.files import write_spec


@click.command(context_settings={"allow_interspersed_args": False})
@topology.options
@click.option("--timeout", type=SECONDS, metavar="SECONDS", help="End the run after this long, with exit code 124.")
@click.option("--samples", type=OUT_FILE, help="Write what links carry and queue to this file, 20 times a second.")
@click.option("--write", type=OUT_FILE, help="Write the spec to this file, for --file, and run nothing.")
@click.option("--quiet", is_flag=True, help="Do not say what the lab is made of before the ranks start.")
@click.option("--json", "as_json", is_flag=True, help="At the end, print a line of JSON on stdout: how each rank ended.")
@click.argument("command_line", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED)
def command(
    timeout: float | None,
    samples: Path | None,
    write: Path | None,
    quiet: bool,
    as_json: bool,
    command_line: tuple[str, ...],
    **given: Any,
) -> None:
    """Run COMMAND once on each host of a cluster in a box. `gradlane lab doctor` says what this kernel can do for one.

    A host is a network namespace with one link to a switch, so that no root and no second machine is needed. The
    ranks find each other as under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...). A COMMAND that ends in .py is run
    with this Python. The output of rank 0 comes as it is, that of the others with "[rank] " before each line.

    The exit code is that of the first rank that failed; 124 when the time was up, 130 after Ctrl-C.

    \b
    gradlane lab --hosts 4 --link 500mbit -- train.py --epochs 1
    gradlane lab --hosts 4 --servers 4 --link 10gbit --scale 0.1 -- train.py
    gradlane lab --hosts 2 --link 1gbit -- ip addr
    """
    if command_line[:1] == ("doctor",):
        arguments = list(command_line[1:])
        exit_code = lab_doctor.command.main(arguments, prog_name="gradlane lab doctor", standalone_mode=False)
        click.get_current_context().exit(exit_code)
    if (
        len(command_line) == 1
        and shutil.which(command_line[0]) is None
        and (meant := did_you_mean(command_line[0], ["doctor"]))
    ):
        raise InputError(f"lab: got {command_line[0]!r}{meant}, expected a program on the PATH")
    spec = topology.Topology(**given).spec()
    if write is not None:
        if command_line:
            raise InputError(f"--write: got it with the command {command_line[0]!r}, expected one or the other")
        with files.writing(write):
            write_spec(write, spec)
        if not as_json:
            click.echo(f"wrote {write}")
        return
    if command_line and command_line[0].endswith(".py"):
        command_line = (sys.executable, *command_line)
    for job in spec.all_jobs:
        program = Path((job.command or command_line or ("",))[0])
        is_python = program.name.startswith("python") or program == Path(sys.executable)
        if is_python:
            need_memory("lab", len(job.workers), PYTHON_BYTES)
        if not job.server_command:
            need_memory("lab --servers", len(job.servers))
    outcome = execute(spec, command_line, timeout=timeout, announce=not quiet, samples=samples)
    if as_json:
        line = {"hosts": spec.hosts, "link_bits_per_second": spec.link_bits_per_second, **msgspec.structs.asdict(outcome)}
        click.echo(msgspec.json.encode(line))
    click.get_current_context().exit(outcome.exit_code)
