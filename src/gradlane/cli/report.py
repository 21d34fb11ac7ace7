"""`gradlane report`: one HTML file that shows what a comparison or a job left."""

from __future__ import annotations

from pathlib import Path

import click

from gradlane.cli.inputs.types import IN_FOLDER, OUT_FILE
from gradlane.report.page import REPORT, write_report


@click.command()
@click.argument("folder", type=IN_FOLDER)
@click.option("--out", type=OUT_FILE, help="The file to write. Default: report.html in FOLDER.")
def command(folder: Path, out: Path | None) -> None:
    """Make a report of what `gradlane compare --out FOLDER` or `gradlane launch --timeline FOLDER` left there.

    The report is one HTML file that needs no network. It shows the answer, every step, the timelines of two
    iterations of each policy, where a step's time goes, and the plans.

    \b
    gradlane compare --out out
    gradlane report out
    """
    target = out or folder / REPORT
    write_report(folder, target)
    click.echo(f"{target} is the report; it opens in a browser")
