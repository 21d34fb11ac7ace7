"""`gradlane probe --priority`: whether DSCP marks survive the path, and whether the network serves
marked packets first.
"""

from __future__ import annotations

import re
import sys

import click
import msgspec
from rich.table import Table

from gradlane import lab
from gradlane.cli.inputs.faults import naming
from gradlane.cli.terminal import console, print_table
from gradlane.compare.memory import PYTHON_BYTES
from gradlane.compare.processes import run_on_lab
from gradlane.errors import InputError, RunError
from gradlane.transport import path
from gradlane.units import format_rate, parse_rate


def probe(
    listen: str | None, connect: str | None, senders: int, link: str | None, classes: int, seconds: float, as_json: bool
) -> None:
    """Listen, send, or, if neither is asked for, do both on emulated hosts.

    Args:
        listen: HOST:PORT to listen on, or None.
        connect: HOST:PORT to send to, or None.
        senders: how many hosts send, 1 or 2.
        link: rate of the emulated links, as in 500mbit; None for 200mbit.
        classes: priority classes of the emulated links.
        seconds: how long to measure.
        as_json: print JSON instead of tables.

    Raises:
        InputError: an option is not usable.
        RunError: a process on an emulated host failed.
    """
    if listen is not None and connect is not None:
        raise InputError("probe: got --listen and --connect, expected one of them on each host")
    if connect is not None:
        path.send(*_address("--connect", connect))
    elif listen is not None:
        show(path.listen(*_address("--listen", listen), senders, seconds), as_json)
    else:
        # all hosts run one command; each reads its role from its environment, as a rank does
        with naming("--link"):
            rate = parse_rate(link or "200mbit")
        spec = lab.LabSpec(hosts=senders + 1, link_bits_per_second=rate, network_classes=classes)
        arguments = [str(senders), str(seconds), *(["--json"] if as_json else [])]
        exit_code = run_on_lab(spec, [sys.executable, "-m", "gradlane.cli.priority_host", *arguments], rank_bytes=PYTHON_BYTES)
        if exit_code:
            raise RunError.of("the probe", exit_code)


def _address(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InputError(f"{option}: got {text!r}, expected HOST:PORT")
    return host, int(port)


def show(found: path.PathReport, as_json: bool) -> None:
    """Print what a listener found."""
    if as_json:
        facts = {**msgspec.structs.asdict(found), "survives": found.survives, "wins": found.wins}
        click.echo(msgspec.json.encode(facts))
        return
    table = Table("sent as DSCP", "arrived as", title="marks", title_justify="left")
    for sent, came in found.arrived.items():
        table.add_row(str(sent), ", ".join(map(str, came)) or "lost")
    shown = console()
    print_table(table)
    rates = (format_rate(rate) for rate in (found.marked_bytes_per_second, found.unmarked_bytes_per_second))
    shown.print("beside one another: marked {}, unmarked {}".format(*rates), highlight=False)
    where = "the port towards this host" if found.senders == 2 else "the sender's own queue"
    shown.print(f"marks {'survive' if found.survives else 'do NOT survive'} the path", highlight=False)
    shown.print(f"{where} {'serves' if found.wins else 'does NOT serve'} the marked first", highlight=False)
