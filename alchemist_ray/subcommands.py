"""Parsers of subcommands: one text is the line in the list of commands and the description."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rows = Iterable[Sequence[Any]]


def parser_of(prog: str, description: str, rows: Rows = ()) -> argparse.ArgumentParser:
    """A parser with these options (see `add_options`). A text of several lines stays as it is."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    if "\n" in description:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, rows)
    return parser


def add_subcommand(commands: Any, name: str, text: str, **options: Any) -> argparse.ArgumentParser:
    """Add a subcommand to the result of `add_subparsers`; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=sentence(text), **options
    )
    return parser


def add_verbs(
    parser: argparse.ArgumentParser, verbs: Mapping[str, str], rows: Rows, *starting: str
) -> None:
    """Add subcommands, which are in `verb` of the result.

    Parameters
    ----------
    verbs : mapping of str to str
        Their texts.
    rows : iterable of tuple
        As for `add_options`, after the names of the subcommands that take the option.
    *starting : str
        Those that start a program, which comes after ``--``.
    """
    commands = parser.add_subparsers(dest="verb", required=True)
    for verb, text in verbs.items():
        usage = f"{parser.prog} {verb} [options] -- COMMAND" if verb in starting else None
        command = add_subcommand(commands, verb, text, usage=usage)
        add_options(command, [row for of, *row in rows if verb in of.split()])


def add_options(parser: argparse.ArgumentParser, rows: Rows) -> None:
    """Add options from a table.

    Parameters
    ----------
    rows : iterable of tuple
        Flags, with the name of the value in the help, or (in lower case) in the result:
        ``"-t --time SECONDS time_s"``; a default, or a type; the help, in which ``%(default)s`` is
        the default; a map of further arguments of `add_argument`, if any. Of the defaults, False
        makes an option without a value, a tuple lists the choices, and a list collects values.
    """
    for flags, value, text, *more in rows:
        names = [word for word in flags.split() if word.startswith("-")]
        options: dict[str, Any] = {"help": text} | (more[0] if more else {})
        for word in flags.split()[len(names) :]:
            options["metavar" if word.isupper() else "dest"] = word
        match value:
            case False:
                options["action"] = "store_true"
            case tuple():
                options["choices"] = value
            case list():
                options |= {"action": "append", "default": value}
            case _ if callable(value):
                options["type"] = value
            case _:
                options |= {"type": type(value), "default": value}
        parser.add_argument(*names, **options)


def sentence(text: str) -> str:
    """Format ``list the gangs`` as ``List the gangs.``."""
    return f"{text[0].upper()}{text[1:]}."


def positive(text: str) -> float:
    """An option that is a number greater than 0, as the `type` of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0; got {text}")
    return value


def names(text: str) -> list[str]:
    """An option that is a list of names: ``a,b``."""
    return [name.strip() for name in text.split(",") if name.strip()]
