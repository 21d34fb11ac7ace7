"""Errors about what was typed, in one form: `WHERE: got THIS, expected THAT`, where WHERE is the option as it is typed.

click and argparse have forms of their own; `of_click` and `of_argparse` put those into this one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

import click
from click.core import ParameterSource

from gradlane.core.fields import did_you_mean
from gradlane.errors import FormatError, InputError

_FIELD = re.compile(r"^[\w. -]+: (?=got )")  # the name that the library has for the value


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Let an error about a value name the option that it was given with; one about a file keeps the file's name."""
    try:
        yield
    except FormatError:
        raise
    except InputError as error:
        raise InputError(f"{option}: {_FIELD.sub('', str(error))}") from None


def refuse_given(why: str, *names: str) -> None:
    """Raise `InputError` if the running command was given an option that would have no effect.

    Args:
        why: what it was given with or without, and what is expected, as in "with --loopback, expected one or the other".
        names: the parameters of such options.
    """
    ctx = click.get_current_context()
    for param in ctx.command.params:
        if param.name in names and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise InputError(f"{_typed(param, ctx)}: got it {why}")


def of_click(error: click.UsageError) -> InputError:
    """The error in gradlane's form.

    Args:
        error: of click's, about the command line.
    """
    command = _command(error.ctx)
    see = f"; see gradlane {command} --help" if command else ""
    before = f"{command}: " if command else ""
    text = error.message
    if isinstance(error, click.MissingParameter):
        return InputError(f"{before}got no {_typed(error.param, error.ctx)}, expected one{see}")
    if isinstance(error, click.BadParameter) and error.param is not None:
        return InputError(f"{_typed(error.param, error.ctx)}: {_FIELD.sub('', text)}")
    if isinstance(error, click.NoSuchOption):
        return InputError(
            f"{before}got {_unknown(error.option_name, _options(error.ctx))}, expected an option that it has{see}"
        )
    if isinstance(error, click.BadOptionUsage):
        got = "a value, expected none" if "not take a value" in text else "no value, expected one"
        return InputError(f"{error.option_name}: got {got}{see}")
    extra = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", text)
    if extra is not None:
        return InputError(f"{before}got the argument {extra[1]!r} too, expected no more{see}")
    unknown = re.match(r"No such command '(.*?)'", text)
    if unknown is not None and error.ctx is not None and isinstance(error.ctx.command, click.Group):
        names = error.ctx.command.list_commands(error.ctx)
        meant = did_you_mean(unknown[1], names)
        return InputError(f"{before}got the command {unknown[1]!r}{meant}, expected one of {', '.join(names)}")
    return InputError(f"{before}{text[:1].lower()}{text[1:].removesuffix('.')}{see}")


def of_argparse(message: str, options: Iterable[str]) -> str:
    """The text of an error in gradlane's form, without the name of the command.

    Args:
        message: what argparse says.
        options: those that there are.
    """
    unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message)
    if unknown is not None:
        return f"got {_unknown(unknown[1], options)}, expected an option that it has"
    named = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
    if named is None:
        return message
    option = named[1].rpartition("/")[2]
    chosen = re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", named[2])
    if chosen is not None:
        names = chosen[2].replace("'", "").split(", ")
        return f"{option}: got {one_of(chosen[1], names)}"
    if named[2].startswith("expected"):
        return f"{option}: got no value, {named[2].replace('one argument', 'one')}"
    return f"{option}: {_FIELD.sub('', named[2])}"


def one_of(got: str, names: Iterable[str]) -> str:
    """What was got, the name that was meant if one is near, and the names that there are."""
    names = list(names)
    return f"{got!r}{did_you_mean(got, names)}, expected {'one of ' * (len(names) > 1)}{', '.join(names)}"


def _unknown(option: str, options: Iterable[str]) -> str:
    # without the dashes, which all of them have in common
    meant = did_you_mean(option.lstrip("-"), [name.lstrip("-") for name in options if name.startswith("--")])
    return f"{option}{meant.replace('mean ', 'mean --')}"


def _options(ctx: click.Context | None) -> list[str]:
    return [] if ctx is None else [name for param in ctx.command.params for name in param.opts]


def _command(ctx: click.Context | None) -> str:
    """The command, as it is typed after `gradlane`."""
    names: list[str] = []
    while ctx is not None and ctx.parent is not None:
        names.insert(0, ctx.info_name or "")
        ctx = ctx.parent
    return " ".join(names)


def _typed(param: click.Parameter | None, ctx: click.Context | None) -> str:
    assert param is not None
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    name = param.metavar or (param.name or "").upper()
    return name.strip("[].")
