"""`gradlane convert`: a profile from a trace that another tool recorded."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.text import Text

from gradlane import trace
from gradlane.cli.inputs.types import IN_FILE, OUT_FILE, Choice, parse_time
from gradlane.cli.terminal import console
from gradlane.core import files
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.units import counted, format_bytes, format_ns

_OPTIONS = {"compute_ns": "--compute", "tensors": "--names-from"}  # that give arguments of `trace.read`


@click.command()
@click.argument("path", metavar="TRACE", type=IN_FILE)
@click.option("--out", type=OUT_FILE, help="Write the profile as JSON.")
@click.option("--format", "format_", type=Choice(trace.FORMATS), help="Default: told from the contents.")
@click.option(
    "--names-from",
    metavar="PROFILE.json",
    type=IN_FILE,
    help="A profile of the same model, for the names of gradients (and sizes, of a trace without shapes): kineto, chakra.",
)
@click.option(
    "--compute", metavar="TIME", help="Forward and backward together, as in 300ms, for a trace without times (chakra)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def command(
    path: Path, out: Path | None, format_: str | None, names_from: Path | None, compute: str | None, as_json: bool
) -> None:
    """Make a profile of TRACE: a PyTorch profiler or Chakra trace, a PipeDream graph or an MG-WFBP
    log, gzipped or not.
    """
    tensors = None if names_from is None else files.read(names_from, Profile).specs
    compute_ns = None if compute is None else parse_time("--compute", compute)
    try:
        profile = trace.read(path, format=format_, tensors=tensors, compute_ns=compute_ns)
    except InputError as error:
        argument, _, said = str(error).partition(": ")
        if argument not in _OPTIONS:
            raise
        raise InputError(f"{_OPTIONS[argument]}: {said}") from None
    if as_json:
        click.echo(msgspec.json.format(files.dumps(profile), indent=2).decode())
    else:
        rest = f", uncovered {format_ns(profile.uncovered_ns)}" if profile.uncovered_ns else ""
        console().print(
            Text(
                f"{profile.model}: {counted(len(profile.tensors), 'tensors')}, {format_bytes(profile.size_bytes)}, "
                f"{counted(len(profile.layers), 'layers')}; forward {format_ns(profile.forward_ns)}, backward "
                f"{format_ns(profile.backward_ns)}, update {format_ns(profile.update_ns)}{rest}\nsource: {profile.source}"
            ),
            soft_wrap=True,
        )
    if out is not None:
        with files.writing(out):
            files.write(out, profile)
        if not as_json:
            click.echo(f"wrote {out}")
