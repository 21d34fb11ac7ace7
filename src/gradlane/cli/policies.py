"""`gradlane policies`: what there is to choose from."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradlane import policies
from gradlane.core.backends import BACKENDS
from gradlane.planning import catalog


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(as_json: bool) -> None:
    """List the policies: the paper of each, how it differs from it, its knobs with their defaults,
    and what carries it live.
    """
    rows = [_row(name) for name in catalog.names()]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
        return
    table = Table(
        "name",
        "paper",
        "differs from it",
        show_lines=True,
        caption="Where none is named, a session finds the best by itself (auto).\n*: what --knob and --tune are of then",
    )
    table.add_column("knobs", no_wrap=True)
    table.add_column("backends", no_wrap=True)
    for row in rows:
        knobs = "\n".join(f"{knob}={value}" for knob, value in row["knobs"].items()) or "-"
        carried = [f"{backend} *" if backend in row["default"] else backend for backend in row["backends"]]
        backends = "\n".join(carried) or "simulator only"
        table.add_row(*(Text(cell) for cell in (row["name"], row["paper"], row["differs"], knobs, backends)))
    Console().print(table)


def _row(name: str) -> dict[str, Any]:
    policy = catalog.get(name)
    assert isinstance(policy, msgspec.Struct)
    return {
        "name": name,
        "default": [backend for backend in BACKENDS if name == policies.default(backend)],
        "paper": policy.paper,
        "differs": policy.differs,
        "knobs": msgspec.structs.asdict(policy),
        "backends": [backend for backend in BACKENDS if name in catalog.names(backend)],
    }
