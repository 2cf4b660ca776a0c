"""A Helm template from the objects that all combinations of some options give.

A node of the tree that only some combinations have gets an ``if``. Its condition is the shortest
one, in the values of the chart, that is true for exactly these combinations.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Variants = frozenset[int]
# Texts that YAML does not take for something else.
PLAIN = re.compile(r"(?!(?i:true|false|null|yes|no|on|off|y|n)$)[A-Za-z][\w./-]*")
Nodes = dict[int, Any]  # what a variant has at a place; variants without it are left out


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The text of a template in the place of values that the renderer was given.

    Parameters
    ----------
    words : dict of str to str
        A word in texts and numbers, and the expression that replaces it.
    optional : dict of str to str
        The JSON of a node, and the value that replaces it; without a value the key is left out.
    lists : dict of str to (str, str)
        The JSON of a list, the value that it is made of, and the YAML of one element.
    texts : dict of str to str
        A long text, and the file of the chart that has it.
    """

    words: Mapping[str, str]
    optional: Mapping[str, str]
    lists: Mapping[str, tuple[str, str]]
    texts: Mapping[str, str]

    def scalar(self, value: Any) -> str:
        """The YAML of a text, a number, a bool or None."""
        if isinstance(value, str) and value in self.texts:
            return f'{{{{ .Files.Get "{self.texts[value]}" | toJson }}}}'
        if isinstance(value, str) and value in self.words:
            return f"{{{{ {self.words[value]} | toString | quote }}}}"
        text = json.dumps(value)
        pattern = "|".join(map(re.escape, self.words))
        replaced = re.sub(
            rf"\{{\{{|{pattern}",
            lambda m: '{{ "{{" }}' if m[0] == "{{" else f"{{{{ {self.words[m[0]]} }}}}",
            text,
        )
        plain = replaced == text and isinstance(value, str) and PLAIN.fullmatch(value)
        return value if plain else replaced


@dataclass(slots=True)
class Conditions:
    """Conditions for sets of variants.

    Parameters
    ----------
    choices : sequence of dict
        The options of each variant.
    literals : dict of (option, value) to str
        The condition that an option has a value.
    """

    choices: Sequence[Mapping[str, Any]]
    literals: Mapping[tuple[str, Any], str]
    _known: list[tuple[Variants, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        simple = [
            (frozenset(i for i, c in enumerate(self.choices) if c[option] == value), text)
            for (option, value), text in self.literals.items()
        ]
        self._known += simple
        for count in (2, 3):
            for group in itertools.combinations(simple, count):
                words = " ".join(f"({text})" for _, text in group)
                self._known.append((frozenset.intersection(*(s for s, _ in group)), f"and {words}"))
                self._known.append((frozenset.union(*(s for s, _ in group)), f"or {words}"))

    def of(self, wanted: Variants, within: Variants) -> str | None:
        """The condition by which `wanted` is told from the rest of `within`; None for all."""
        if wanted == within:
            return None
        for variants, text in self._known:
            if variants & within == wanted:
                return text
        raise ValueError(f"no condition of three options gives {len(wanted)} of {len(within)}")


@dataclass(frozen=True, slots=True)
class Template:
    """Writes nodes that differ between variants as YAML with conditions."""

    conditions: Conditions
    placeholders: Placeholders

    def object(self, nodes: Nodes, within: Variants) -> str:
        """The template of an object, such as it is in each variant that has it."""
        lines = ["---", *self._mapping(nodes)]
        return "\n".join(self._conditional(lines, nodes, within)) + "\n"

    def _conditional(self, lines: list[str], nodes: Nodes, within: Variants) -> list[str]:
        condition = self.conditions.of(frozenset(nodes), within)
        return lines if condition is None else [f"{{{{- if {condition} }}}}", *lines, "{{- end }}"]

    def _mapping(self, nodes: Nodes) -> list[str]:
        keys = _order([list(node) for node in nodes.values()])
        lines: list[str] = []
        for key in keys:
            below = {variant: node[key] for variant, node in nodes.items() if key in node}
            lines += self._conditional(self._entry(key, below), below, frozenset(nodes))
        return lines

    def _entry(self, key: str, nodes: Nodes) -> list[str]:
        name = self.placeholders.scalar(key)
        first = next(iter(nodes.values()))
        same = all(node == first for node in nodes.values())
        if same and (value := self.placeholders.optional.get(json.dumps(first))):
            return [f"{{{{- with {value} }}}}", f"{name}: {{{{ toJson . }}}}", "{{- end }}"]
        if same and (made := self.placeholders.lists.get(json.dumps(first))):
            value, element = made
            return [f"{name}:", f"{{{{- range {value} }}}}", f"- {element}", "{{- end }}"]
        if isinstance(first, dict) and first:
            return [f"{name}:", *_indented(self._mapping(nodes))]
        if isinstance(first, list) and first:
            return [f"{name}:", *self._sequence(nodes)]
        return self._scalars(f"{name}: ", nodes)

    def _sequence(self, nodes: Nodes) -> list[str]:
        if len({len(node) for node in nodes.values()}) == 1:
            columns = range(len(next(iter(nodes.values()))))
            below = [{variant: node[i] for variant, node in nodes.items()} for i in columns]
        else:
            named = {v: {_identity(one): one for one in node} for v, node in nodes.items()}
            names = _order([list(node) for node in named.values()])
            below = [{v: node[n] for v, node in named.items() if n in node} for n in names]
        lines: list[str] = []
        for element in below:
            first = next(iter(element.values()))
            if isinstance(first, dict):
                inner = _indented(self._mapping(element))
                text = [f"- {inner[0].strip()}", *inner[1:]]
                if inner[0].strip().startswith("{{-"):  # an optional key cannot follow the dash
                    text = ["-", *inner]
            else:
                text = self._scalars("- ", element)
            lines += self._conditional(text, element, frozenset(nodes))
        return lines

    def _scalars(self, start: str, nodes: Nodes) -> list[str]:
        """One line, or one for each value that variants have."""
        by_value: dict[str, list[int]] = {}
        for variant, node in nodes.items():
            by_value.setdefault(self.placeholders.scalar(node), []).append(variant)
        values = sorted(by_value, key=lambda value: len(by_value[value]))
        if len(values) == 1:
            return [f"{start}{values[0]}"]
        lines: list[str] = []
        within = frozenset(nodes)
        for value in values[:-1]:
            condition = self.conditions.of(frozenset(by_value[value]), within)
            lines += [f"{{{{- {'else ' if lines else ''}if {condition} }}}}", f"{start}{value}"]
        return [*lines, "{{- else }}", f"{start}{values[-1]}", "{{- end }}"]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _identity(element: Any) -> str:
    """By which an element of a list is the same in two variants."""
    name = element.get("name") if isinstance(element, dict) else None
    return name if isinstance(name, str) else json.dumps(element)


def _order(sequences: list[list[str]]) -> list[str]:
    """All members, in an order that agrees with that of each sequence."""
    found: list[str] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        at = 0
        for member in sequence:
            if member in found:
                at = found.index(member) + 1
            else:
                found.insert(at, member)
                at += 1
    return found
