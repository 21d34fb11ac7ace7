"""`gradlane zoo`: profiles of well-known networks, to plan with before anything has been measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

from gradlane import zoo
from gradlane.cli.inputs import completion
from gradlane.cli.inputs.computing import Computing
from gradlane.cli.inputs.types import COUNT, OUT_FILE
from gradlane.cli.terminal import console, print_table
from gradlane.core import files
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.units import counted, format_bytes, format_ns, format_rate

LARGEST = 8


@click.command()
@click.argument("name", required=False, shell_complete=completion.models)
@click.option(
    "--device",
    shell_complete=completion.devices,
    help="One of --devices. Default: the one that a paper used.",
)
@click.option("--batch", type=COUNT, help="Samples a worker and iteration. Default: as a paper.")
@click.option("--out", type=OUT_FILE, help="Write the profile as JSON.")
@click.option("--buses", is_flag=True, help="List what connects the devices of a host instead: values of --bus.")
@click.option("--devices", is_flag=True, help="List the devices instead, with what their data sheets say: values of --device.")
@click.option("--links", is_flag=True, help="List what a host's cards are sold as instead: values of --rate.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the list, or the profile.")
def command(
    name: str | None,
    device: str | None,
    batch: int | None,
    out: Path | None,
    buses: bool,
    devices: bool,
    links: bool,
    as_json: bool,
) -> None:
    """List the networks, or show NAME's profile: exact tensors, times counted and calibrated where
    they can be.

    `gradlane plan`, `simulate` and `whatif` take NAME in place of a profile's file.
    """
    lists = (("--buses", buses, _list_buses), ("--devices", devices, _list_devices), ("--links", links, _list_links))
    asked = [(option, show) for option, is_asked, show in lists if is_asked]
    of_name = (("--device", device), ("--batch", batch), ("--out", out))
    if asked:
        others = [option for option, _ in asked[1:]] + [option for option, value in of_name if value is not None]
        others += [] if name is None else [name]
        if others:
            raise InputError(f"{asked[0][0]}: got it with {others[0]}, expected one or the other")
        asked[0][1](as_json)
        return
    if name is None:
        for option, value in of_name:
            if value is not None:
                raise InputError(f"{option}: got it without NAME, expected the network that it is for; gradlane zoo lists them")
        _list(as_json)
        return
    profile = Computing(device, batch).of_zoo("NAME", name)
    if as_json:
        click.echo(msgspec.json.format(files.dumps(profile), indent=2).decode())
    else:
        _show(profile)
    if out is not None:
        with files.writing(out):
            files.write(out, profile)
        if not as_json:
            click.echo(f"wrote {out}")


def _list(as_json: bool) -> None:
    entries = [(zoo.describe(name), zoo.profile(name)) for name in zoo.names()]
    if as_json:
        rows = [
            {
                "name": entry.name,
                "title": entry.title,
                "tensors": entry.tensors,
                "parameters": entry.parameters,
                "operations_per_sample": entry.operations,
                "batch": entry.batch,
                "device": entry.device,
                "forward_ns": profile.forward_ns,
                "backward_ns": profile.backward_ns,
                "source": entry.source,
            }
            for entry, profile in entries
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return
    table = Table(padding=(0, 0))  # fits 80 columns
    table.add_column("name")
    for heading in ("tensors", "params", "GFLOPs", "batch"):
        table.add_column(heading, justify="right")
    table.add_column("device")
    table.add_column("iteration", justify="right")
    table.add_column("scaled to")
    for entry, profile in entries:
        cells = (
            entry.name,
            str(entry.tensors),
            f"{entry.parameters / 1e6:.1f}M",
            f"{entry.operations / 1e9:.1f}",
            str(entry.batch),
            entry.device,
            f"{'' if entry.paper else '~'}{format_ns(profile.compute_ns)}",
            entry.paper or "-",
        )
        table.add_row(*(Text(cell) for cell in cells))
    shown = console()
    print_table(table)
    shown.print(
        Text(
            "GFLOPs: of a sample's forward pass. Times are counted operations, scaled to a total that the paper named "
            "states or (~) by what such totals are elsewhere; gradlane zoo NAME says where."
        )
    )


def _print_as_json(specs: Mapping[str, object]) -> None:
    rows = [{"name": name, **msgspec.to_builtins(spec)} for name, spec in specs.items()]
    click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())


def _list_buses(as_json: bool) -> None:
    if as_json:
        _print_as_json(zoo.BUSES)
        return
    table = Table()
    for heading in ("name", "what", "each device", "startup"):
        table.add_column(heading)
    for name, spec in zoo.BUSES.items():
        cells = (name, spec.title, f"{spec.bytes_per_second / 1e9:g} GB/s", format_ns(spec.startup_ns))
        table.add_row(*(Text(cell) for cell in cells))
    print_table(table)
    shown = console()
    for name, spec in zoo.BUSES.items():
        shown.print(Text(f"{name}: {spec.source}"))


def _list_links(as_json: bool) -> None:
    if as_json:
        _print_as_json(zoo.LINKS)
        return
    table = Table()
    for heading in ("name", "what", "each way", "source"):
        table.add_column(heading)
    for name, link in zoo.LINKS.items():
        cells = (name, link.title, format_rate(link.bits_per_second // 8), link.source)
        table.add_row(*(Text(cell) for cell in cells))
    print_table(table)
    console().print(Text("Several cards of a host: --rate 8xndr. A row of zoo/data/links.json is a link."))


def _list_devices(as_json: bool) -> None:
    if as_json:
        _print_as_json(zoo.DEVICES)
        return
    table = Table(padding=(0, 0))
    table.add_column("name")
    for heading in ("memory", "GB/s", *zoo.PRODUCTS.values()):
        table.add_column(heading, justify="right")
    table.add_column("source")
    for name, spec in zoo.DEVICES.items():
        peaks = [spec.operations_per_second.get(dtype) for dtype in zoo.PRODUCTS]
        cells = (
            name,
            f"{spec.memory_gib} GiB",
            f"{spec.bytes_per_second / 1e9:g}",
            *("-" if peak is None else f"{peak / 1e12:g}" for peak in peaks),
            spec.source,
        )
        table.add_row(*(Text(cell) for cell in cells))
    print_table(table)
    console().print(Text("FP32 to FP16: TFLOP/s of dense products. A row of zoo/data/devices.json is a device."))


def _show(profile: Profile) -> None:
    shown = console()
    shown.print(
        Text(
            f"{profile.model}: {counted(len(profile.tensors), 'tensors')}, {format_bytes(profile.size_bytes)}; forward "
            f"{format_ns(profile.forward_ns)}, backward {format_ns(profile.backward_ns)}, update {format_ns(profile.update_ns)}"
        )
    )
    shown.print(Text(f"source: {profile.source}"))
    table = Table(title=f"the {LARGEST} largest tensors", title_justify="left")
    table.add_column("tensor")
    for heading in ("size", "ready after"):
        table.add_column(heading, justify="right")
    for tensor in sorted(profile.tensors, key=lambda tensor: -tensor.spec.size_bytes)[:LARGEST]:
        cells = (tensor.spec.name, format_bytes(tensor.spec.size_bytes), format_ns(tensor.ready_ns))
        table.add_row(*(Text(cell) for cell in cells))
    print_table(table)
