"""Commands that the documentation shows are ones that `alchemist` has, with their options."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import cache

import pytest

from alchemist_ray import cli
from ali.registry import load
from tests.docs.pages import ROOT, documents

SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(alchemist [a-z][^`]*)`")
SUBCOMMANDS = {"token": 1, "slurm": 1, "pbs": 1, "bench": 1, "virtual-cluster": 1}
BY_ALI = ("new-library", "run-routine", "include")  # processes of their own: `tests/ali`


def shown() -> dict[str, str]:
    """Every command with the page that shows it first."""
    found: dict[str, str] = {}
    for page in documents():
        text = page.read_text().replace("\\\n", " ")
        lines = [line for block in SHELL.findall(text) for line in block.splitlines()]
        lines = [line.partition("  #")[0] for line in lines] + INLINE.findall(SHELL.sub("", text))
        for line in lines:
            for command in re.split(r"&&|\|| -- (?!.\"\$@)| > ", line.replace(r"\|", "|")):
                words = command.split()
                if words[:1] == ["alchemist"] and len(words) > 1:
                    found.setdefault(command.strip(), str(page.relative_to(ROOT)))
    return found


@cache
def usage(*words: str) -> str:
    """The output of ``alchemist WORDS --help``."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert ended.value.code == 0, words
    return said.getvalue()


@pytest.mark.parametrize(("command", "page"), shown().items(), ids=list(shown()))
def test_a_command_and_its_options_exist(command: str, page: str) -> None:
    words = shlex.split(re.sub(r"\.\.\.$", "", command))[1:]
    if words[0] in BY_ALI:
        return
    path = words[: 1 + SUBCOMMANDS.get(words[0], 0)]
    text = usage(*(word for word in path if not word.startswith("-")))
    for option in (word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)):
        assert re.search(rf"(?<![\w-]){re.escape(option)}\b", text), f"{page}: {command}"


def test_the_table_of_linalg_names_what_its_routines_declare() -> None:
    declared = {about["name"]: about for about in load("linalg").describe()["routines"]}
    page = (ROOT / "docs" / "libraries.md").read_text()
    named = 0
    for shown_routine, taken, given in re.findall(
        r"^\| `(\w+)\((.*?)\)`[^|]* \| ([^|]*)", page, re.M
    ):
        if (about := declared.get(shown_routine)) is None:
            continue  # of another library
        parameters = [name for name, *_ in about["parameters"]]
        assert {word for word in taken.split(", ") if word != "..."} <= set(parameters), taken
        results = [name for name, _ in about["results"]]
        words = [word.split(" ")[0] for word in given.partition(";")[0].strip().split(", ")]
        if words[0] == results[0] and len(words) > 1 and words[-1] in results:
            named += 1
            assert words == results[: len(words)], f"{shown_routine}: {given}"
    assert named >= 4


def test_the_documentation_shows_commands() -> None:
    assert len(shown()) >= 20
