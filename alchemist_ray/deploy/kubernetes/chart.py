"""The Helm chart in ``kuberay/chart``, generated from the renderer.

Its values have the names of the options of ``alchemist kuberay render``, and ``helm template``
gives the renderer's objects. Left out are the namespace, which Helm creates, and RayJobs.

A node of the tree that only some combinations have gets an ``if``. Its condition is the shortest
one, in the values of the chart, that is true for exactly these combinations.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from alchemist_ray.deploy.kubernetes.dashboard import dashboard_text
from alchemist_ray.deploy.kubernetes.manifests import manifests
from alchemist_ray.deploy.kubernetes.options import (
    CLUSTER_NAME_LIMIT,
    GANG_SCHEDULERS,
    HELP,
    KUBERAY_VERSION,
    OBJECT_STORE_TENTHS,
    QUEUES,
    ClusterOptions,
    parts,
)
from alchemist_ray.version import __version__
from mpi_workers.matrix.sizes import SUFFIXES

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


Map = dict[str, Any]
HEADER = "Generated by `alchemist kuberay overlays --write kuberay`. Do not edit."
NOT_IN_THE_CHART = ("name", "namespace", "job")  # of the release; a RayJob is no installation
NODE_CHOICES = ("node_selector", "head_node_selector", "tolerations", "head_tolerations")
LISTS = ("pull_secrets", "api_server", "gateway_networks")
BASE = ClusterOptions()

# Options that decide which objects and fields there are: all their combinations are rendered.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "autoscale": (False, True),
    "gateway": (False, True),
    "monitoring": (False, True),
    "network_policy": (None, False),
    "host_network": (False, True),
    "rdma_resource": (None, "sentinel.example/rdma"),
    "gang": (None, *GANG_SCHEDULERS),
}
# All others get a value that a template can find again.
NUMBERS: Map = {"workers": 70001, "cpus": 70003, "idle_timeout_s": 70005}
TEXTS: Map = {
    "name": "sentinel-name",
    "namespace": "sentinel-namespace",
    "image": "sentinel.example/image:1",
    "pull_policy": "sentinel-pull-policy",
    "pull_secrets": "sentinel-pull-secret",
    "memory": "70007Gi",
    "head_cpus": "70009",
    "head_memory": "70011Gi",
    "storage": "70013Gi",
    "node_selector": "sentinel=worker",
    "head_node_selector": "sentinel=head",
    "tolerations": "sentinel-worker:NoExecute",
    "head_tolerations": "sentinel-head:NoExecute",
    "operator_namespace": "sentinel-operator",
    "api_server": "192.0.2.1/32",
    "gateway_networks": "192.0.2.2/32",
    "monitoring_namespace": "sentinel-monitoring",
}
QUEUE = "sentinel-queue"

# In the chart these are lists and maps, as a pod has them.
ABOUT = {
    "pull_secrets": "Secrets for pulling the image: [{name: registry}]",
    "node_selector": "labels of nodes for worker pods: {disk: ssd}",
    "tolerations": "of worker pods: [{key: hpc, operator: Exists, effect: NoSchedule}]",
    "head_node_selector": "labels of nodes for the head pod",
    "head_tolerations": "of the head pod",
    "network_policy": "limit traffic by NetworkPolicies; not with hostNetwork",
}

HELPERS = f"""\
{{{{/* {HEADER} */}}}}
{{{{/* Bytes of a Kubernetes quantity. */}}}}
{{{{- define "alchemist.bytes" -}}}}
{{{{- $number := regexFind "^[0-9.]+" . -}}}}
{{{{- $units := fromJson {json.dumps(json.dumps(SUFFIXES))} -}}}}
{{{{- int64 (mulf (float64 $number) (float64 (get $units (trimPrefix $number .)))) -}}}}
{{{{- end }}}}
{{{{/* Ray's object store, a part of a pod's memory. */}}}}
{{{{- define "alchemist.store" -}}}}
{{{{- div (mul (include "alchemist.bytes" . | int64) {OBJECT_STORE_TENTHS}) 10 -}}}}
{{{{- end }}}}
{{{{/* The queue of the gang scheduler; nothing if it has no queues. */}}}}
{{{{- define "alchemist.queue" -}}}}
{{{{- $usual := get (fromJson {json.dumps(json.dumps(QUEUES))}) .Values.gang -}}}}
{{{{- if $usual }}}}{{{{ .Values.queue | default $usual }}}}{{{{ end -}}}}
{{{{- end }}}}
"""
CHECKS = f"""\
{{{{/* {HEADER} */}}}}
{{{{- if and .Values.gang .Values.autoscale }}}}
{{{{- fail "gang and autoscale exclude each other: choose one" }}}}
{{{{- end }}}}
{{{{- if and .Values.rdmaResource (not .Values.hostNetwork) }}}}
{{{{- fail "rdmaResource needs hostNetwork: the devices belong to the node" }}}}
{{{{- end }}}}
{{{{- if and .Values.queue (not (include "alchemist.queue" .)) }}}}
{{{{- fail "queue: only the gang schedulers {", ".join(QUEUES)} have queues" }}}}
{{{{- end }}}}
{{{{- if gt (len .Release.Name) {CLUSTER_NAME_LIMIT} }}}}
{{{{- fail "the name of the release has more than {CLUSTER_NAME_LIMIT} characters" }}}}
{{{{- end }}}}
"""
NOTES = """\
The cluster is ready when this ends:

  kubectl -n {{ .Release.Namespace }} wait raycluster/{{ .Release.Name }} \\
    --for=jsonpath='{.status.state}'=ready --timeout=10m

Try it:

  kubectl -n {{ .Release.Namespace }} exec service/{{ .Release.Name }}-head-svc -c ray-head -- \\
    alchemist demo --workers 2 --out /tmp/out
{{- if not .Values.hostNetwork }}

Kubernetes refuses privileged pods in the namespace after:

  kubectl label namespace {{ .Release.Namespace }} pod-security.kubernetes.io/enforce=restricted
{{- end }}
"""


def files() -> dict[str, str]:
    """Return the text of every file of the chart, by its path below ``kuberay/``."""
    found = {
        "Chart.yaml": _chart(),
        "values.yaml": _values(),
        "values.schema.json": json.dumps(_schema(), indent=1) + "\n",
        "files/dashboard.json": dashboard_text(),
        "templates/_helpers.tpl": HELPERS,
        "templates/checks.yaml": CHECKS,
        "templates/NOTES.txt": NOTES,
        **_templates(),
    }
    return {f"chart/{name}": text for name, text in found.items()}


def value_name(option: str) -> str:
    """The chart's name of an option: ``headMemory``."""
    first, *others = option.split("_")
    return first + "".join(word.capitalize() for word in others)


def _about(option: str) -> str:
    """Its explanation, with the chart's names of options."""
    text = ABOUT.get(option, HELP[option])
    return re.sub(r"--([a-z][a-z-]*)", lambda m: value_name(m[1].replace("-", "_")), text)


def chart_values(o: ClusterOptions) -> Map:
    """The values with which the chart gives the objects of these options."""
    return {value_name(option): _value(o, option) for option in _options()}


def _options() -> list[str]:
    return [f.name for f in fields(ClusterOptions) if f.name not in NOT_IN_THE_CHART]


def _value(o: ClusterOptions, option: str) -> Any:
    value = getattr(o, option)
    if option == "network_policy":
        return value is not False
    if option in NODE_CHOICES:
        return o.node_choice(option)
    if option == "pull_secrets":
        return [{"name": name} for name in parts(value)]
    if option in LISTS:
        return parts(value)
    return "" if value is None else value


def _combinations() -> list[Map]:
    """All combinations of switches that are no error."""
    found = []
    for values in itertools.product(*SWITCHES.values()):
        chosen = dict(zip(SWITCHES, values, strict=True))
        queue: Map = {"queue": QUEUE} if chosen["gang"] in QUEUES else {}
        try:
            ClusterOptions(**TEXTS, **NUMBERS, **chosen, **queue)
        except ValueError:
            continue
        found.append({**chosen, **queue})
    return found


def _placeholders() -> Placeholders:
    sample = ClusterOptions(**TEXTS, **NUMBERS)
    head, worker = sample.object_store_bytes
    words = {
        str(head): 'include "alchemist.store" .Values.headMemory',
        str(worker): 'include "alchemist.store" .Values.memory',
        str(sample.workers + 1): "add1 (int .Values.workers)",
        QUEUE: 'include "alchemist.queue" .',
        TEXTS["name"]: ".Release.Name",
        TEXTS["namespace"]: ".Release.Namespace",
        SWITCHES["rdma_resource"][1]: ".Values.rdmaResource",
    }
    words |= {str(number): f"int .Values.{value_name(name)}" for name, number in NUMBERS.items()}
    once = (*NODE_CHOICES, *LISTS, "name", "namespace")
    words |= {text: f".Values.{value_name(n)}" for n, text in TEXTS.items() if n not in once}
    secrets = json.dumps([{"name": TEXTS["pull_secrets"]}])
    optional = {secrets: ".Values.pullSecrets"} | {
        json.dumps(sample.node_choice(option)): f".Values.{value_name(option)}"
        for option in NODE_CHOICES
    }
    lists = {
        json.dumps([{"ipBlock": {"cidr": TEXTS[option]}}]): (
            f".Values.{value_name(option)}",
            "ipBlock: {cidr: {{ . | quote }}}",
        )
        for option in ("api_server", "gateway_networks")
    }
    return Placeholders(words, optional, lists, {dashboard_text(): "files/dashboard.json"})


def _templates() -> dict[str, str]:
    """A file for each kind of object."""
    choices = _combinations()
    literals: dict[tuple[str, Any], str] = {}
    for option, values in SWITCHES.items():
        value = f".Values.{value_name(option)}"
        if option == "gang":
            literals |= {(option, v): f"eq {value} {json.dumps(v)}" for v in values[1:]}
            literals[option, None] = f"not {value}"
        elif option == "network_policy":
            literals |= {(option, None): value, (option, False): f"not {value}"}
        else:
            literals |= {(option, values[1]): value, (option, values[0]): f"not {value}"}
    template = Template(Conditions(choices, literals), _placeholders())
    rendered = [manifests(ClusterOptions(**TEXTS, **NUMBERS, **chosen)) for chosen in choices]
    objects: dict[tuple[str, str], dict[int, Map]] = {}
    for variant, found in enumerate(rendered):
        for one in found:
            key = (one["kind"], one["metadata"]["name"])
            objects.setdefault(key, {})[variant] = one
    texts: dict[str, str] = {}
    for (kind, _), nodes in objects.items():
        if kind != "Namespace":
            name = f"templates/{kind.lower()}.yaml"
            text = texts.setdefault(name, f"{{{{/* {HEADER} */}}}}\n")
            texts[name] = text + template.object(nodes, frozenset(range(len(choices))))
    return texts


def _chart() -> str:
    plan = {
        "apiVersion": "v2",
        "name": "alchemist-on-ray",
        "description": "A Ray cluster with gangs of MPI ranks, under the KubeRay operator",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "annotations": {"kuberay": KUBERAY_VERSION},
    }
    text: str = yaml.safe_dump(plan, sort_keys=False)
    return f"# {HEADER}\n{text}"


def _values() -> str:
    lines = [f"# {HEADER}", "# The options of `alchemist kuberay render`, with these names."]
    for name, value in chart_values(BASE).items():
        option = next(o for o in _options() if value_name(o) == name)
        lines += [f"# {_about(option)}", f"{name}: {json.dumps(value)}"]
    return "\n".join(lines) + "\n"


def _schema() -> Map:
    quantity = {"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)?({'|'.join(SUFFIXES)})$"}
    objects = {"type": "array", "items": {"type": "object"}}
    special: dict[str, Map] = {
        "image": {"type": "string", "pattern": "(:[^/:]+|@sha256:[0-9a-f]{64})$",
                  "not": {"pattern": ":latest$"}},
        "pull_policy": {"enum": ["IfNotPresent", "Always", "Never"]},
        "gang": {"enum": ["", *GANG_SCHEDULERS]},
        "head_cpus": {"type": ["string", "number"]},
        "memory": quantity, "head_memory": quantity, "storage": quantity,
        "tolerations": objects, "head_tolerations": objects, "pull_secrets": objects,
    }  # fmt: skip
    kinds: dict[str, Map] = {
        "bool": {"type": "boolean"},
        "int": {"type": "integer", "minimum": 1},
        "str": {"type": "string"},
        "dict": {"type": "object"},
        "list": {"type": "array", "items": {"type": "string"}},
    }
    properties: Map = {"global": {"type": "object"}}
    for option in _options():
        kind = kinds[type(_value(BASE, option)).__name__]
        properties[value_name(option)] = {"description": _about(option)} | special.get(option, kind)
    return {
        "$schema": "https://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
