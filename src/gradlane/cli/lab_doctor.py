"""`gradlane lab doctor`: what this kernel can and cannot do for a lab."""

from __future__ import annotations

import click
import msgspec
from rich.table import Table

from gradlane.cli.terminal import console
from gradlane.lab import doctor


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Try, in namespaces that go away again, all that a lab asks of the kernel. Exit code 0: a lab
    works here.
    """
    findings = doctor.examine()
    works = doctor.works(findings)
    if as_json:
        click.echo(msgspec.json.encode({"works": works, "findings": findings}))
    else:
        table = Table("", "what", "for", "found", box=None)
        for finding in findings:
            mark = "[green]yes" if finding.works else "[red]NO" if finding.needed else "no"
            table.add_row(mark, finding.name, finding.use, finding.detail)
        console().print(table)  # its last column is prose, which may wrap
        click.echo("a lab works here" if works else "no lab can be made here: what is marked NO is needed")
    ctx.exit(0 if works else 1)
