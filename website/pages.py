"""Pages that are made: one for each policy, one for the commands."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import shlex
import textwrap
from typing import Any

import click
from click.testing import CliRunner

import gradlane
from gradlane import errors, policies
from gradlane.cli import main
from gradlane.cli.launch import help_text
from gradlane.planning import catalog
from gradlane.planning.searched import Searched

CASES = {
    "short step, many startups": "resnet50 --device v100 --batch 64 --rate 10gbit --workers 16",
    "large tensors": "vgg16 --rate 10gbit --workers 8",
    "slow network": "resnet152 --rate 1gbit --workers 8",
    "over servers": "vgg16 --rate 10gbit --workers 8 --servers same --colocated",
}
"""What each policy is tried on, as arguments of `gradlane simulate`."""


def policy_names() -> tuple[str, ...]:
    """The policies that have a page: all of the papers', without the search over plans."""
    return tuple(name for name in catalog.names() if name != Searched.name)


@functools.cache
def _standing(case: str) -> dict[str, dict[str, float]]:
    """What `gradlane simulate` says of each policy that can run there."""
    wanted = policy_names() if "--servers" in case else policies.names("all-reduce")
    words = [word for name in wanted for word in ("--policy", name)]
    done = CliRunner().invoke(main, ["simulate", *shlex.split(case), *words, "--json"], catch_exceptions=False)
    return {row["policy"]: row for row in json.loads(done.stdout)["rows"]}


def policy(name: str) -> str:
    """A policy's page, in Markdown: its class's docstring, a picture, and where it stands in each case."""
    made = policies.get(name)
    kind = type(made)
    about = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:")[0]
    about = about.replace("\nWins where ", "\n**Wins where** ").replace(
        "\nDiffers from the paper", "\n**Differs from the paper**"
    )
    carried = " and ".join(backend for backend in ("all-reduce", "server") if name in policies.names(backend))
    rows = "\n".join(f"| {row} |" for row in _rows(name))
    return f"""# {name}

{about}

Paper: {made.paper}. Carried by: {carried}.

![Two steps of a small network under ddp and under {name}, simulated](../pictures/policy-{name}.svg)

The picture is a simulated run of a network of five layers; [concepts](../concepts.md) says how to read it.

## Where it stands

Simulated, in four cases: the step, DDP's step over it, and how far it is above what no schedule can beat.

| case | step | x ddp | above bound | first in this case |
|---|---|---|---|---|
{rows}

{_cases()}

## Try it

    gradlane.attach(model, optimizer, policy="{name}")

```
gradlane launch --nproc 2 --policy {name} train.py
```

## The class

::: {kind.__module__}.{kind.__qualname__}
    options:
      show_root_heading: true
      heading_level: 3
      show_docstring_description: false
      members: []
"""


def _rows(name: str) -> list[str]:
    rows = []
    for title, case in CASES.items():
        standing = _standing(case)
        first = min(standing, key=lambda each: standing[each]["iteration_ns"])
        if name not in standing:
            rows.append(f"{title} | not carried there | | | [{first}]({first}.md)")
            continue
        row, ddp = standing[name], standing["ddp"]
        above = row["iteration_ns"] / row["bound_ns"] - 1
        rows.append(
            f"{title} | {row['iteration_ns'] / 1e6:.1f} ms | {ddp['iteration_ns'] / row['iteration_ns']:.2f} | "
            f"{above:.1%} | [{first}]({first}.md)"
        )
    return rows


def _cases() -> str:
    return textwrap.indent("\n".join(f"gradlane simulate {case}" for case in CASES.values()), "    ")


REFERENCE = {
    "Sessions": (
        "attach", "Session", "IdleSession", "StepMetrics", "VerifyOptions", "DistributedDataParallel", "replace_ddp",
        "init_process_group", "attach_to_servers", "ServedSession", "planning.tuning.TuneOptions",
    ),
    "Nouns": (
        "Profile", "core.profile.TensorProfile", "core.profile.TensorSpec", "core.profile.Layer", "Network", "Plan",
        "core.plan.Message", "core.plan.Slice", "core.plan.Lane", "Timeline", "core.timeline.Span", "core.policy.Policy",
    ),
    "Checks": (
        "testing.policies.check_policy", "testing.searches.check_search", "testing.fabrics.check_fabric",
        "testing.backends.check_backend",
    ),
    "Errors": tuple(f"errors.{name}" for name in vars(errors) if name.endswith("Error")),
}  # fmt: skip
"""The names below `gradlane` that have a reference."""


def python() -> str:
    """The reference of the Python interface, in Markdown.

    Raises:
        ValueError: a public name has no docstring, or no reference.
    """
    listed = {name for names in REFERENCE.values() for name in names}
    public = {name for name in gradlane.__all__ if name not in ("__version__", "policies")}
    wrong = sorted(public - listed - {name.rpartition(".")[2] for name in listed})
    wrong += [f"{name}: no docstring" for name in sorted(listed) for name in undocumented(_resolve(name))]
    if wrong:
        raise ValueError(f"reference: {', '.join(wrong)}")
    parts = ["# Python\n\nThe names of `gradlane` that scripts use. [Policies](../policies/index.md) have a page each.\n"]
    for title, names in REFERENCE.items():
        parts.append(f"## {title}\n")
        for name in names:
            found = _resolve(name)
            place = f"{found.__module__}.{found.__qualname__}"
            parts.append(f"::: {place}\n    options: {{show_root_heading: true, heading_level: 3}}\n")
    return "\n".join(parts)


def _resolve(name: str) -> Any:
    module, _, last = f"gradlane.{name}".rpartition(".")
    return getattr(importlib.import_module(module), last)


def undocumented(found: Any) -> list[str]:
    """A function or a class, and the public members that the class defines, as far as they have no docstring."""
    below = vars(found) if isinstance(found, type) else {}
    members = {
        name: member
        for name, member in below.items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod)))
    }
    bare = [f"{found.__qualname__}.{name}" for name, member in members.items() if not inspect.getdoc(member)]
    return bare if inspect.getdoc(found) else [found.__qualname__, *bare]


def overview() -> str:
    """The list of all policies, in Markdown."""
    rows = []
    for name in policy_names():
        made = policies.get(name)
        first = inspect.cleandoc(type(made).__doc__ or "").split("\n\n")[0].replace("\n", " ")
        rows.append(f"| [{name}]({name}.md) | {first} | {made.paper} |")
    listing = "\n".join(rows)
    return f"""# Policies

A policy is a pure function from a profile and a network to a plan. `auto`, the default, tries several
of them in the job itself and keeps the fastest ([how](../auto.md)). [One of your own](../policies.md)
takes one file.

| policy | what it does | paper |
|---|---|---|
{listing}
"""


def commands() -> str:
    """The reference of the command line, in Markdown: what --help prints."""
    parts = [
        "# Commands\n",
        "What `--help` prints. What all commands have in common is on [a page of its own](../commands.md).\n",
    ]
    context = click.Context(main, info_name="gradlane")
    parts += [f"```\n{main.get_help(context)}\n```\n"]
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        inner = click.Context(command, parent=context, info_name=name)
        parts.append(f"## {name}\n\n```\n{help_text() if name == 'launch' else command.get_help(inner)}\n```\n")
        if not isinstance(command, click.Group):
            continue
        for below in command.list_commands(inner):
            deeper = command.get_command(inner, below)
            assert deeper is not None
            text = deeper.get_help(click.Context(deeper, parent=inner, info_name=below))
            parts.append(f"### {name} {below}\n\n```\n{text}\n```\n")
    return "\n".join(parts)
