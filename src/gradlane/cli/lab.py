"""`gradlane lab`: run a command on every host of an emulated cluster, joined by shaped links."""

from __future__ import annotations

import sys

import click
import msgspec

from gradlane.cli.jobs import rate_or_none
from gradlane.errors import InputError
from gradlane.lab import LabSpec, execute


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--hosts", type=click.IntRange(min=1), default=2, show_default=True, help="How many hosts; one rank runs on each."
)
@click.option(
    "--link",
    default="none",
    show_default=True,
    metavar="RATE",
    help="Rate of every host's link, in each direction by itself, as in 500mbit or 10gbit; none leaves links unshaped.",
)
@click.option("--timeout", type=float, metavar="SECONDS", help="End the run after this long, with exit code 124.")
@click.option("--quiet", is_flag=True, help="Do not say what the lab is made of before the ranks start.")
@click.option("--json", "as_json", is_flag=True, help="At the end, print a line of JSON on stdout: how each rank ended.")
@click.argument("command_line", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    hosts: int,
    link: str,
    timeout: float | None,
    quiet: bool,
    as_json: bool,
    command_line: tuple[str, ...],
) -> None:
    """Run COMMAND once on each host of a cluster in a box.

    A host is a network namespace with one link to a switch, so that no root and no second machine is needed. The
    ranks find each other as under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...). A COMMAND that ends in .py is run
    with this Python. The output of rank 0 comes as it is, that of the others with "[rank] " before each line.

    The exit code is that of the first rank that failed; 124 when the time was up, 130 after Ctrl-C.

    \b
    gradlane lab --hosts 4 --link 500mbit -- train.py --epochs 1
    gradlane lab --hosts 2 --link 1gbit -- ip addr
    """
    if command_line[0].startswith("-"):
        raise InputError(f"lab: got the unknown option {command_line[0]}, expected one of those in --help")
    spec = LabSpec(hosts=hosts, link_bits_per_second=rate_or_none(link))
    if command_line[0].endswith(".py"):
        command_line = (sys.executable, *command_line)
    outcome = execute(spec, command_line, timeout=timeout, announce=not quiet)
    if as_json:
        line = {"hosts": hosts, "link_bits_per_second": spec.link_bits_per_second, **msgspec.structs.asdict(outcome)}
        click.echo(msgspec.json.encode(line))
    ctx.exit(outcome.exit_code)
