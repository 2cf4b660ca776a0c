"""``alchemist virtual-cluster image|render|up|down``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alchemist_ray.deploy.virtual_cluster import cluster, image
from alchemist_ray.deploy.virtual_cluster.guests import (
    Options,
    cells_here,
    domain,
    guests_of,
    parse_cells,
    parse_memory,
    settings,
)
from alchemist_ray.plural import counted
from alchemist_ray.subcommands import add_verbs, parser_of, positive

SECRET = "(created by up)"
DEFAULTS = Options()
# Fields of `Options`, with their defaults.
FIELDS = {
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
WITHOUT_DEFAULT = {"cpus": int, "sriov": str, "volume": str}
VERBS = {
    "image": "make the files that guests boot from",
    "render": "print libvirt's definitions of the guests",
    "up": "start guests with Ray, here or on the hosts of the job",
    "down": "end the guests and remove everything",
}
# Subcommands that take the option, and its row (see `add_options`).
OPTIONS: tuple[tuple[Any, ...], ...] = (
    ("image", "--root", Path, "an unpacked container image", {"required": True}),
    ("image", "--kernel", Path("/"), "an unpacked kernel package"),
    ("image", "--busybox", image.BUSYBOX, "a static busybox"),
    ("image", "--driver", [],
     "a further module of the kernel, with those that it needs; may be repeated (drivers of "
     "virtual functions: iavf, ixgbevf, mlx5_core)"),
    ("image", "--out", Path, "folder to write to", {"required": True}),
    ("render", "--hosts", 1, "number of hosts (default: 1)"),
    ("render", "--cells", str, "a host's cores by NUMA node, 0-15;16-31 (default: this host's)"),
    ("render", "--folder", Path("/run/alchemist"),
     "folder on the host for definitions and settings"),
    ("render", "--settings", False, "print the guests' settings instead of the definitions"),
    ("up", "--connect", "qemu:///system", "libvirt's URI (default: %(default)s)"),
    ("up", "--limit SECONDS", positive, "time limit for the guests to start (default: 300)",
     {"default": 300.0}),
    ("up", "--join CLUSTER", str, "a running virtual cluster whose Ray the guests join"),
    *(
        ("render up", f"--{name.replace('_', '-')}",
         WITHOUT_DEFAULT.get(name) or getattr(DEFAULTS, name),
         text if name in WITHOUT_DEFAULT else f"{text} (default: %(default)s)")
        for name, text in FIELDS.items()
    ),
    ("render up", "--memory", "8G",
     "memory of each guest, in M, G or T: 2^20, 2^30, 2^40 bytes (default: 8G)"),
    ("render up", "--emulate", False, "emulate the guests even if KVM works (slow)"),
    ("render up", "--no-huge-pages", False, "use ordinary pages for guests' memory"),
    ("render up", "--static-arp", False,
     "tell guests the hardware addresses of all guests, so that they do not ask"),
    ("down", "--name", DEFAULTS.name, "cluster to end (default: %(default)s)"),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run a subcommand. Returns 0, or 2 for invalid options."""
    parser = parser_of(
        "alchemist virtual-cluster", "Run Ray in virtual machines, several per host."
    )
    add_verbs(parser, VERBS, OPTIONS)
    asked = parser.parse_args(argv[1:])
    run = {"image": _image, "render": _render, "up": _up, "down": _down}[asked.verb]
    try:
        run(asked)
    except ValueError as error:
        sys.stderr.write(f"alchemist virtual-cluster {asked.verb}: {error}\n")
        return 2
    return 0


def _options(asked: argparse.Namespace) -> Options:
    return Options(
        **{name: getattr(asked, name) for name in (*FIELDS, "emulate", "static_arp")},
        hosts=getattr(asked, "hosts", 1),
        memory_mib=parse_memory(asked.memory),
        huge_pages=not asked.no_huge_pages,
    )


def _image(asked: argparse.Namespace) -> None:
    image.make(asked.root, asked.kernel, asked.out, asked.busybox, asked.driver)
    sys.stdout.write("".join(f"{asked.out / name}\n" for name in image.FILES))


def _render(asked: argparse.Namespace) -> None:
    options = _options(asked)
    cells = parse_cells(asked.cells) if asked.cells else cells_here()
    for number in range(options.hosts):
        for guest in guests_of(options, number, cells):
            if asked.settings:
                sys.stdout.write(f"# {guest.name}.conf\n{settings(options, guest, SECRET)}")
            else:
                sys.stdout.write(domain(options, guest, asked.folder))


def _up(asked: argparse.Namespace) -> None:
    if not asked.emulate and not cluster.has_kvm():
        _options(asked)  # other mistakes first
        sys.stderr.write(
            "alchemist: no KVM here (vmx or svm in /proc/cpuinfo, access to /dev/kvm are needed): "
            "guests are emulated, many times slower\n"
        )
        asked.emulate = True
    options = _options(asked)
    folder = cluster.up(options, asked.connect, asked.limit, asked.join)
    count = options.guests * max(1, len(cluster.hosts()))
    sys.stdout.write(f"Ray is up in {counted(count, 'guest')}\n{cluster.to_join(options, folder)}")


def _down(asked: argparse.Namespace) -> None:
    cluster.down(asked.name)
