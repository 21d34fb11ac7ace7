"""The report: one HTML file that shows what a run found, and opens without a network."""

from __future__ import annotations

from pathlib import Path

from gradlane.core import files
from gradlane.report.page.facts import Facts
from gradlane.report.page.html import render_page
from gradlane.report.page.run_folder import REPORT, read_run

__all__ = ["REPORT", "Facts", "read_run", "render_page", "write_report"]


def write_report(folder: Path, target: Path) -> None:
    """Write the report of the run in `folder` to the file `target`. Raises as `read_run`, and `OutputError`."""
    page = render_page(read_run(folder))
    with files.writing(target):
        files.write_bytes(target, page)
