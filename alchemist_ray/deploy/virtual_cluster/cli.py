"""``alchemist virtual-cluster image|render|up|down``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from alchemist_ray.deploy.virtual_cluster import cluster, image, kvm, topology
from alchemist_ray.deploy.virtual_cluster.domain import domain
from alchemist_ray.deploy.virtual_cluster.options import Options, guests_of, parse_memory, settings
from alchemist_ray.plural import counted
from alchemist_ray.subcommands import add_subcommand, positive

OF_NO_DEFAULT: dict[str, type] = {"cpus": int, "sriov": str, "volume": str}
SECRET = "(created by up)"
HELP = {
    "name": "prefix of the guests' names: NAME-<host>-<number>",
    "image": "folder with vmlinuz, initrd.gz and root.img, on every host",
    "guests": "guests on each host",
    "cpus": "cores of each guest (default: the host's, shared evenly)",
    "bridge": "bridge of the hosts for the guests' network",
    "network": "addresses of the guests' network",
    "first": "number of the first guest's address in the network",
    "mtu": "MTU of the bridge",
    "sriov": "libvirt network of virtual functions; each guest gets one instead of the bridge",
    "volume": "folder on the hosts for a persistent disk of each guest, its /volume",
    "volume_gib": "size of a new volume, in GiB",
}


def main(argv: Sequence[str]) -> int:
    """Run a subcommand. Returns 0, or 2 for invalid options."""
    options = _parser().parse_args(argv[1:])
    try:
        return int(options.do(options))
    except ValueError as error:
        sys.stderr.write(f"alchemist virtual-cluster {options.verb}: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist virtual-cluster",
        description="Run Ray in virtual machines, several per host.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    made = add_subcommand(verbs, "image", "make the files that guests boot from")
    made.add_argument("--root", type=Path, required=True, help="an unpacked container image")
    made.add_argument("--kernel", type=Path, default=Path("/"), help="an unpacked kernel package")
    made.add_argument("--busybox", type=Path, default=image.BUSYBOX, help="a static busybox")
    made.add_argument(
        "--driver",
        action="append",
        default=[],
        help="a further module of the kernel, with those that it needs; may be repeated (drivers "
        "of virtual functions: iavf, ixgbevf, mlx5_core)",
    )
    made.add_argument("--out", type=Path, required=True, help="folder to write to")
    made.set_defaults(do=_image)
    render = add_subcommand(verbs, "render", "print libvirt's definitions of the guests")
    render.add_argument("--hosts", type=int, default=1, help="number of hosts (default: 1)")
    render.add_argument(
        "--cells", help="a host's cores by NUMA node, 0-15;16-31 (default: this host's)"
    )
    render.add_argument(
        "--folder",
        type=Path,
        default=Path("/run/alchemist"),
        help="folder on the host for definitions and settings",
    )
    render.add_argument(
        "--settings",
        action="store_true",
        help="print the guests' settings instead of the definitions",
    )
    render.set_defaults(do=_render)
    up = add_subcommand(verbs, "up", "start guests with Ray, here or on the hosts of the job")
    up.add_argument(
        "--connect", default="qemu:///system", help="libvirt's URI (default: qemu:///system)"
    )
    up.add_argument(
        "--limit",
        type=positive,
        default=300.0,
        metavar="SECONDS",
        help="time limit for the guests to start (default: 300)",
    )
    up.set_defaults(do=_up)
    for verb in (render, up):
        defaults = Options()
        for field in fields(Options):
            if field.name in HELP:
                default = getattr(defaults, field.name)
                shown = HELP[field.name] + ("" if default is None else f" (default: {default})")
                kind = OF_NO_DEFAULT.get(field.name) or type(default)
                option = f"--{field.name.replace('_', '-')}"
                verb.add_argument(option, type=kind, default=default, help=shown)
        verb.add_argument(
            "--memory",
            default="8G",
            help="memory of each guest, in M, G or T: 2^20, 2^30, 2^40 bytes (default: 8G)",
        )
        verb.add_argument(
            "--emulate", action="store_true", help="emulate the guests even if KVM works (slow)"
        )
        verb.add_argument(
            "--no-huge-pages", action="store_true", help="use ordinary pages for guests' memory"
        )
        verb.add_argument(
            "--static-arp",
            action="store_true",
            help="tell guests the hardware addresses of all guests, so that they do not ask",
        )
    down = add_subcommand(verbs, "down", "end the guests and remove everything")
    down.add_argument(
        "--name", default=Options().name, help=f"cluster to end (default: {Options().name})"
    )
    down.set_defaults(do=_down)
    return parser


def _options(asked: argparse.Namespace) -> Options:
    given = {name: getattr(asked, name) for name in HELP}
    return Options(
        **given,
        hosts=getattr(asked, "hosts", 1),
        memory_mib=parse_memory(asked.memory),
        emulate=asked.emulate,
        huge_pages=not asked.no_huge_pages,
        static_arp=asked.static_arp,
    )


def _image(asked: argparse.Namespace) -> int:
    image.make(asked.root, asked.kernel, asked.out, asked.busybox, asked.driver)
    sys.stdout.write("".join(f"{asked.out / name}\n" for name in image.FILES))
    return 0


def _render(asked: argparse.Namespace) -> int:
    options = _options(asked)
    cells = topology.parse(asked.cells) if asked.cells else topology.here()
    for number in range(options.hosts):
        for guest in guests_of(options, number, cells):
            if asked.settings:
                sys.stdout.write(f"# {guest.name}.conf\n{settings(options, guest, SECRET)}")
            else:
                sys.stdout.write(domain(options, guest, asked.folder))
    return 0


def _up(asked: argparse.Namespace) -> int:
    options = _options(asked)
    if not options.emulate and not kvm.works():
        sys.stderr.write(
            "alchemist: KVM does not work here (/dev/kvm): guests are emulated, many times slower\n"
        )
        asked.emulate = True
        options = _options(asked)
    folder = cluster.up(options, asked.connect, asked.limit)
    count = options.guests * max(1, len(cluster.hosts()))
    sys.stdout.write(f"Ray is up in {counted(count, 'guest')}\n{cluster.to_join(options, folder)}")
    return 0


def _down(asked: argparse.Namespace) -> int:
    cluster.down(asked.name)
    return 0
