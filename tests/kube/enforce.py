"""NetworkPolicies, kept by iptables on a node whose pods are routed: a program of its own.

    python -m tests.kube.enforce KUBECONFIG

It reads pods, namespaces and policies every second and writes one set of chains, into which
all that is forwarded goes. As with most network plugins, what the node itself says to a pod
(probes, the API server's proxy), and what a pod says to its node, is not subject to policies.
A policy applies to a pod from the second after the pod has its address.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Map = dict[str, Any]
CHAIN = "POLICIES"
EVERY_S = 1.0


class Api:
    """The API server, as far as lists go."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._server = cluster["server"]
        self._token = config["users"][0]["user"]["token"]
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._context.verify_flags &= ~ssl.VERIFY_X509_STRICT

    def items(self, path: str) -> list[Map]:
        request = urllib.request.Request(
            f"{self._server}{path}", headers={"Authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=10, context=self._context) as answer:
            found: list[Map] = json.load(answer)["items"]
        return found


def selects(selector: Map, labels: Map) -> bool:
    """Whether a label selector selects what has these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        value, values = labels.get(rule["key"]), rule.get("values", [])
        if not {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[rule["operator"]]:
            return False
    return True


def _labels(o: Map) -> Map:
    return o["metadata"].get("labels", {})


class Rules:
    """The chains that the policies of this moment come to."""

    def __init__(self, pods: list[Map], namespaces: list[Map]) -> None:
        self._pods = [
            pod
            for pod in pods
            if pod["status"].get("podIP")
            and not pod["spec"].get("hostNetwork")
            and pod["status"]["phase"] in ("Pending", "Running")
        ]
        self._namespaces = {o["metadata"]["name"]: _labels(o) for o in namespaces}

    def text(self, policies: list[Map]) -> str:
        """For ``iptables-restore``."""
        chains: dict[tuple[str, str], list[str]] = {}
        for policy in policies:
            spec, space = policy["spec"], policy["metadata"]["namespace"]
            for pod in self._pods:
                if pod["metadata"]["namespace"] != space:
                    continue
                if not selects(spec["podSelector"], _labels(pod)):
                    continue
                for way in spec.get("policyTypes", ["Ingress"]):
                    chain = chains.setdefault((way, pod["status"]["podIP"]), [])
                    chain += self._allowed(spec.get(way.lower(), []), way, pod, space)
        head = [f":{CHAIN} - [0:0]"]
        body = [f"-A {CHAIN} -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"]
        for (way, ip), rules in sorted(chains.items()):
            name = f"{CHAIN}-{way[0]}{hashlib.sha256(ip.encode()).hexdigest()[:12]}"
            head.append(f":{name} - [0:0]")
            body.append(f"-A {CHAIN} {'-d' if way == 'Ingress' else '-s'} {ip} -j {name}")
            body += [f"-A {name} {rule}-j RETURN" for rule in rules]
            body.append(f"-A {name} -j DROP")
        return "\n".join(["*filter", *head, *body, "COMMIT", ""])

    def _allowed(self, rules: list[Map], way: str, pod: Map, space: str) -> Iterator[str]:
        side = "-s" if way == "Ingress" else "-d"
        for rule in rules:
            ports = list(_ports(rule))
            peers = rule.get("from" if way == "Ingress" else "to", [])
            addresses = self._addresses(peers, space) if peers else [""]
            for address in addresses:
                peer = f"{side} {address} " if address else ""
                yield from (f"{peer}{port}" for port in ports)

    def _addresses(self, peers: list[Map], space: str) -> list[str]:
        found = set()
        for peer in peers:
            if set(peer) == {"ipBlock"} and set(peer["ipBlock"]) == {"cidr"}:
                found.add(peer["ipBlock"]["cidr"])
                continue
            if set(peer) - {"podSelector", "namespaceSelector"}:
                raise ValueError(f"not known here: {peer}")
            for pod in self._pods:
                home = pod["metadata"]["namespace"]
                if "namespaceSelector" in peer:
                    near = selects(peer["namespaceSelector"], self._namespaces[home])
                else:
                    near = home == space
                if near and selects(peer.get("podSelector", {}), _labels(pod)):
                    found.add(pod["status"]["podIP"])
        return sorted(found)


def _ports(rule: Map) -> Iterator[str]:
    if not rule.get("ports"):
        yield ""
    for port in rule.get("ports", []):
        yield f"-p {port.get('protocol', 'TCP').lower()} --dport {int(port['port'])} "


def _write(text: str, old: str) -> None:
    subprocess.run(["iptables-restore", "--noflush"], input=text, text=True, check=True)
    jump = ["FORWARD", "-j", CHAIN]
    if subprocess.run(["iptables", "-C", *jump], stderr=subprocess.DEVNULL).returncode:
        subprocess.run(["iptables", "-I", *jump], check=True)
    gone = {line.split()[0] for line in old.splitlines() if line.startswith(f":{CHAIN}-")}
    for line in sorted(gone - {line.split()[0] for line in text.splitlines()}):
        subprocess.run(["iptables", "-F", line[1:]], check=True)
        subprocess.run(["iptables", "-X", line[1:]], check=True)


def main(kubeconfig: Path) -> None:
    api, old = Api(kubeconfig), ""
    while True:
        try:
            rules = Rules(api.items("/api/v1/pods"), api.items("/api/v1/namespaces"))
            policies = api.items("/apis/networking.k8s.io/v1/networkpolicies")
        except OSError as error:  # it is busy; the rules there are go on
            print(repr(error), flush=True)
        else:
            if (text := rules.text(policies)) != old:
                _write(text, old)
                old = text
                print(time.strftime("%T"), text.count("-j RETURN"), "rules", flush=True)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
