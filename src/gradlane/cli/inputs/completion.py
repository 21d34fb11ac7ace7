"""What the shell's Tab key offers for models, devices and policies; click offers commands and options itself."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from gradlane import zoo
from gradlane.core.records.search_log import AUTO
from gradlane.planning import catalog


def beginning_with(incomplete: str, words: Iterable[str]) -> list[CompletionItem]:
    """The `words` that begin with what was typed; of a list with commas, with what stands behind the last one."""
    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{word}") for word in words if word.startswith(last)]


def files(incomplete: str) -> list[CompletionItem]:
    """The shell's own completion of files."""
    return [CompletionItem(incomplete, type="file")]


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the zoo, or files if none fits."""
    return beginning_with(incomplete, zoo.names()) or files(incomplete)


def devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return beginning_with(incomplete, zoo.devices())


def policies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of policies; or files, since a policy may be a user's own."""
    return beginning_with(incomplete, catalog.names()) or files(incomplete)


def trained_policies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """As `policies`, with auto, which only a job that trains has."""
    return beginning_with(incomplete, (AUTO, *catalog.names())) or files(incomplete)
