"""`gradlane policies`: what there is to choose from."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from gradlane import policies
from gradlane.core.backends import BACKENDS
from gradlane.planning import catalog


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the policies: the paper of each, how it differs from it, its knobs with their defaults,
    and what carries it live.
    """
    rows = [_row(name) for name in catalog.names()]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
        return
    for row in rows:
        carried = [f"{backend} *" if backend in row["default"] else backend for backend in row["backends"]]
        knobs = [f"{knob}={value}" for knob, value in row["knobs"].items()]
        click.echo(f"{row['name']}: {', '.join(carried) or 'simulator only'}")
        click.echo(f"    {row['paper']}")
        click.echo(f"    differs from it: {row['differs']}")
        click.echo(f"    knobs: {' '.join(knobs) or 'none'}")
    click.echo(
        "\nKnobs follow the name, as in bytescheduler:partition_bytes=4MiB:credit_bytes=16MiB.\n"
        "Where none is named, a session finds the best by itself (auto).\n*: what --knob and --tune are of then"
    )


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
