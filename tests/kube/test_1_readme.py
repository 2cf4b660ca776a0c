"""From nothing to the demo, by the commands that `kuberay/README.md` gives to a newcomer."""

from __future__ import annotations

import re
import shlex

from tests.kube.cluster import ROOT, Cluster

NAMESPACE = "alchemist"


def commands() -> list[list[str]]:
    """The README's first block of commands, but the first: KubeRay's operator is here."""
    text = (ROOT / "kuberay" / "README.md").read_text()
    block = re.findall(r"```sh\n(.*?)```", text, re.S)[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[0] for words in lines] == ["kubectl"] * 6
    return [words[1:] for words in lines[1:]]


def test_the_readmes_commands_lead_to_the_demo(kube: Cluster) -> None:
    create, label, apply, wait, demo = commands()
    kube.kubectl(*create)
    kube.kubectl(*label)
    with kube.timings("the README's commands: dev overlay applied, ready"):
        kube.kubectl(*(str(ROOT / w) if w.startswith("kuberay/") else w for w in apply))
        kube.kubectl(*wait, limit_s=700)
    with kube.timings("the README's commands: `alchemist demo`"):
        said = kube.kubectl(*demo, limit_s=400)
    hosts = re.findall(r"rank \d+: pid \d+ on (\S+)", said)
    assert len(set(hosts)) == len(hosts) == 2, said
    assert "The picture: /tmp/out/demo.png" in said
    kube.delete(NAMESPACE)
