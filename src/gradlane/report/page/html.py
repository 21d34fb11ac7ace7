"""One HTML file with everything in it: data, scripts and styles. It opens without a network."""

from __future__ import annotations

import base64
import html
import zlib
from importlib import resources

import msgspec

from gradlane.report.page.facts import COMPUTE_KINDS, Facts

_SCRIPTS = (
    "locale.js", "uplot/uPlot.iife.min.js", "dom.js", "speedups.js", "steps.js", "chart.js", "parts.js", "plan.js",
    "questions.js", "timeline.js", "page.js",
)  # fmt: skip
_STYLES = ("uplot/uPlot.min.css", "page.css")


def render_page(facts: Facts) -> bytes:
    """The report as UTF-8.

    The data is compressed and in base64, so that nothing in it can end the element that holds it. The scripts put it on the
    page as text, never as HTML.
    """
    encoded = msgspec.json.encode({"computeKinds": COMPUTE_KINDS, "facts": facts})
    data = base64.b64encode(zlib.compress(encoded, 9)).decode()
    styles = "\n".join(_asset(name) for name in _STYLES)
    scripts = "\n".join(f"<script>{_asset(name)}</script>" for name in _SCRIPTS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(facts.title)} - gradlane</title>
<style>
{styles}
</style>
</head>
<body>
<noscript>This report draws its content with JavaScript, which is switched off here.</noscript>
<main id="page"></main>
<script id="data" type="application/octet-stream">{data}</script>
{scripts}
</body>
</html>
""".encode()


def _asset(name: str) -> str:
    return resources.files("gradlane.report.page").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")
