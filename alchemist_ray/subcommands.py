"""Parsers of subcommands: one text is the line in the list of commands and the description."""

from __future__ import annotations

import argparse
import math
from typing import Any


def add_subcommand(commands: Any, name: str, text: str, **options: Any) -> argparse.ArgumentParser:
    """Add a subcommand to the result of `add_subparsers`; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=sentence(text), **options
    )
    return parser


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
