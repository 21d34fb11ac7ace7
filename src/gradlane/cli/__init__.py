"""The command line. Each command is a file of this package and is imported when it is called.

Only this layer prints, and turns errors into exit codes: 0 done, 1 the work failed, 2 the input was not usable. Ctrl-C gives
130, SIGTERM 143 and SIGHUP 129. If a process that a command started fails, its exit code is the command's.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from gradlane.lifetime import ending_at_once, interruptible, signal_of

# extensions in C that Ctrl-C interrupts while they are imported may be left half made, and crash later
with ending_at_once():
    import click

    from gradlane.cli.inputs import faults
    from gradlane.cli.outputs import printing
    from gradlane.errors import GradlaneError, InputError, OutputError, RunError

# command -> what `gradlane --help` says of it; the module of the same name holds a click command
# `command`
_COMMANDS = {
    "advise": "Measure a script under its own DDP, and say what scheduling would bring.",
    "compare": "Train a real network under every policy, beside torch DDP, and print a table.",
    "convert": "Make a profile of a trace that another tool recorded.",
    "lab": "Run a job with each rank on an emulated host, joined by shaped links.",
    "launch": "torchrun, with gradlane's options; takes any training script.",
    "plan": "Plan one case with every policy, rank them, print the best.",
    "policies": "List the policies, each with its paper.",
    "probe": "Measure what an all-reduce costs between the ranks of a job.",
    "profile": "Measure one iteration of a training script.",
    "report": "Make one HTML file of what a comparison or a job left.",
    "server": "Be a server of a running job, on a host of its own.",
    "simulate": "Every policy on models, rates and cluster sizes, simulated.",
    "whatif": "How much bandwidth, how many workers, which partition size.",
    "zoo": "Profiles of well-known networks to start from.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        with ending_at_once():
            command: click.Command = importlib.import_module(f"gradlane.cli.{cmd_name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not ctx.resilient_parsing:
            if args[0].startswith("-"):
                return super().resolve_command(ctx, args)
            raise InputError(f"got the command {faults.one_of(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with printing():  # of click's own words too
                return super().main(*args, **kwargs)
        except OutputError as error:
            with contextlib.suppress(OSError):
                click.echo(f"gradlane: {error}", err=True)
            sys.exit(1)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _exit_codes():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_codes():
            return super().invoke(ctx)


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """Say what went wrong in one line, and turn it into an exit code."""
    try:
        with interruptible((signal.SIGINT,)):
            try:
                yield
            except click.exceptions.NoArgsIsHelpError:
                raise
            except click.UsageError as error:
                raise faults.of_click(error) from None
    except GradlaneError as error:
        click.echo(f"gradlane: {error}", err=True)
        code = error.exit_code if isinstance(error, RunError) else 2 if isinstance(error, InputError) else 1
        raise click.exceptions.Exit(code) from None
    except KeyboardInterrupt as interrupt:
        number = signal_of(interrupt)
        said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        click.echo(f"gradlane: {said}", err=True)
        raise click.exceptions.Exit(128 + number) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gradlane")
def main() -> None:
    """Schedule the gradient communication of data-parallel training."""
