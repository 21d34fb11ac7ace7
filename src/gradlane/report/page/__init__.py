"""The report: one HTML file that shows what a run found, and opens without a network."""

from gradlane.report.page.facts import Facts
from gradlane.report.page.html import render_page
from gradlane.report.page.run_folder import read_run

__all__ = ["Facts", "read_run", "render_page"]
