"""``alchemist kuberay``: print manifests for ``kubectl``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields

from alchemist_ray.deploy.kubernetes.manifests import manifests, to_yaml
from alchemist_ray.deploy.kubernetes.options import GANG_SCHEDULERS, HELP, ClusterOptions, flag_of
from alchemist_ray.subcommands import add_subcommand


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist kuberay``. Returns 0, or 2 for invalid options."""
    asked = _parser().parse_args(argv[1:])
    chosen = {field.name: getattr(asked, field.name) for field in fields(ClusterOptions)}
    try:
        text = to_yaml(manifests(ClusterOptions(**chosen)))
    except ValueError as error:
        sys.stderr.write(f"alchemist kuberay render: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist kuberay", description="Manifests of a Ray cluster with gangs on Kubernetes."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    render = add_subcommand(verbs, "render", "print manifests for `kubectl apply -f -`")
    for field in fields(ClusterOptions):
        flag = flag_of(field.name)
        default = None if field.default is MISSING else field.default
        text = HELP[field.name]
        if field.name == "network_policy":
            render.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        if default is False:
            render.add_argument(flag, action="store_true", help=text)
            continue
        render.add_argument(
            flag,
            type=int if isinstance(default, int) else str,
            default=default,
            choices=GANG_SCHEDULERS if field.name == "gang" else None,
            help=f"{text} (default: {default})" if default else text,
        )
    return parser
