"""`gradlane profile`: one iteration of a training script, measured while it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.table import Table

from gradlane.cli.inputs.types import COUNT, OUT_FOLDER, SCRIPT, make_folder
from gradlane.cli.terminal import console, print_table
from gradlane.compare.memory import need_memory
from gradlane.compare.processes import need_no_job, need_torch, run_quietly, torchrun_here
from gradlane.core import files
from gradlane.core.launch_options import LAUNCH_VARIABLE, LaunchOptions
from gradlane.core.profile import UNTIL_BACKWARD, Profile
from gradlane.core.stepwise import describe
from gradlane.errors import RunError
from gradlane.lifetime import scratch_folder
from gradlane.units import counted, format_bytes, format_ns


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nproc", type=COUNT, default=1, show_default=True, help="Worker processes on this host.")
@click.option(
    "--out",
    default="profile",
    show_default=True,
    type=OUT_FOLDER,
    help="Folder for profile.json and network.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON, and what SCRIPT prints on stderr.")
@click.argument("script", type=SCRIPT)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(nproc: int, out: Path, as_json: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT, which calls gradlane.attach, and keep the profile of its first iterations.

    It needs six iterations or more; let the script end early. The files are what gradlane plan
    reads.
    """
    need_no_job("profile")
    need_torch("profile")
    need_memory("--nproc", nproc)
    make_folder("--out", out)
    with scratch_folder() as scratch:
        environment = {**os.environ, LAUNCH_VARIABLE: LaunchOptions(profile=scratch).to_text()}
        worker = [*torchrun_here(nproc), "-m", "--", "gradlane.live.startup.boot", script, *arguments]
        # with --json, stdout has the profile alone
        shown = sys.stderr.fileno() if as_json else None
        exit_code = run_quietly(worker, environment, shown)
        if exit_code:
            raise RunError.of("the script", exit_code)
        measured = Path(scratch, "profile.json")
        if not measured.exists():
            click.echo(
                "gradlane: the script left no profile: did it call gradlane.attach, and run six iterations? Of a script that "
                "wraps its model in DistributedDataParallel, gradlane launch --ddp --timeline DIR leaves one",
                err=True,
            )
            raise click.exceptions.Exit(1)
        profile = files.read(measured, Profile)
        for name in ("profile.json", "network.json"):
            content = Path(scratch, name).read_bytes()
            with files.writing(out / name):
                files.write_bytes(out / name, content)
    if as_json:
        click.echo(files.dumps(profile))
        return
    table = Table("layer", "forward", "update", "bytes", "last gradient ready", title=f"{profile.model} on {profile.device}")
    for index, layer in enumerate(profile.layers):
        tensors = [tensor for tensor in profile.tensors if tensor.layer == index]
        size = sum(tensor.spec.size_bytes for tensor in tensors)
        ready = format_ns(max(tensor.ready_ns for tensor in tensors)) if tensors else "-"
        table.add_row(layer.name, format_ns(layer.forward_ns), format_ns(layer.update_ns), format_bytes(size), ready)
    until_backward_ns = sum(layer.forward_ns for layer in profile.layers if layer.name == UNTIL_BACKWARD)
    shown = console()
    print_table(table)
    shown.print(
        f"forward {format_ns(profile.forward_ns - until_backward_ns)}, until backward {format_ns(until_backward_ns)}, "
        f"backward {format_ns(profile.backward_ns)}, uncovered {format_ns(profile.uncovered_ns)}, "
        f"{counted(len(profile.tensors), 'tensors')}, {format_bytes(profile.size_bytes)}; {profile.source}; written to {out}/",
        highlight=False,
    )
    shown.print(describe(profile), highlight=False)
