"""Options of a virtual cluster, its guests, and their assignment to cores by NUMA node."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from alchemist_ray.deploy.virtual_cluster.topology import Cell, shares

MEBI = 1 << 20
UNITS = {"M": 1, "G": 1 << 10, "T": 1 << 20}
PAGE_MIB = 2  # a huge page
PORT = 6379
STORE_SHARE = 0.25  # of a guest's memory, for Ray's object store


@dataclass(frozen=True, slots=True)
class Options:
    """A virtual cluster.

    Attributes
    ----------
    name : str
        Prefix of the guests' names, ``<name>-<host>-<number>``.
    image : str
        Folder with `vmlinuz`, `initrd.gz` and `root.img` (``virtual-cluster image`` makes one), on
        every host.
    hosts, guests : int
        Numbers of hosts, and of guests per host.
    cpus : int, optional
        vCPUs of a guest, each on a core of its own. Default: an equal share of the host's cores.
    memory_mib : int
        Memory of each guest.
    bridge : str
        Bridge of the hosts to the guests' network.
    network : str
        The guests' network; they get its addresses from number `first` on.
    mtu : int
        MTU of the bridge (65520 on IP over InfiniBand, as in the report; 9000 on good Ethernet).
    emulate : bool
        ``type='qemu'``, without KVM: for tests; many times slower.
    huge_pages : bool
        Use huge pages of 2 MB, which the host must have reserved, for the guests' memory.
    static_arp : bool
        Guests know the hardware addresses of all guests, and never ask for them.
    sriov : str, optional
        A libvirt network of virtual functions (``<forward mode='hostdev'>``) on every host. Each
        guest gets one of them, without the bridge.
    volume : str, optional
        Folder on each host for a disk of each guest that outlives it, mounted as /volume.
    volume_gib : int
        Size of that disk when it is made.
    """

    name: str = "vc"
    image: str = "/var/lib/alchemist/image"
    hosts: int = 1
    guests: int = 1
    cpus: int | None = None
    memory_mib: int = 8192
    bridge: str = "br0"
    network: str = "10.78.0.0/24"
    first: int = 31
    mtu: int = 1500
    emulate: bool = False
    huge_pages: bool = True
    static_arp: bool = False
    sriov: str | None = None
    volume: str | None = None
    volume_gib: int = 10

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,40}", self.name):
            raise ValueError(
                f"--name {self.name!r}: it may contain lower-case letters, digits and - only"
            )
        for what, value, least in (
            ("hosts", self.hosts, 1),
            ("guests", self.guests, 1),
            ("memory", self.memory_mib, 256),
            ("mtu", self.mtu, 1280),
            ("first", self.first, 1),
            ("volume-gib", self.volume_gib, 1),
        ):
            if value < least:
                raise ValueError(f"--{what} {value}: it must be at least {least}")
        if self.sriov is not None and self.emulate:
            raise ValueError(
                f"--sriov {self.sriov} with --emulate: virtual functions need KVM and an IOMMU"
            )
        if self.volume is not None and not self.volume.startswith("/"):
            raise ValueError(f"--volume {self.volume}: it must be an absolute path on the hosts")
        if self.memory_mib % PAGE_MIB:
            raise ValueError(
                f"--memory of {self.memory_mib} MiB: it must be a multiple of {PAGE_MIB} MiB"
            )
        room = self.net.num_addresses - self.first - 1
        if self.hosts * self.guests > room:
            raise ValueError(
                f"{self.hosts * self.guests} guests, the first at address {self.first}, do not fit "
                f"into {self.network}"
            )

    @property
    def net(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.network)

    def address(self, number: int) -> str:
        """Return the address of a guest, by its number in the cluster."""
        return str(self.net[self.first + number])

    def mac(self, number: int) -> str:
        """Return the hardware address of a guest: the last three bytes of its address."""
        last = [int(byte) for byte in self.address(number).split(".")[1:]]
        return "52:54:00:" + ":".join(f"{byte:02x}" for byte in last)

    def hostname(self, number: int) -> str:
        return f"{self.name}-{number // self.guests}-{number % self.guests}"


@dataclass(frozen=True, slots=True)
class Guest:
    """A virtual machine."""

    number: int
    name: str
    address: str
    mac: str
    cells: tuple[Cell, ...]
    memory_mib: int

    @property
    def cpus(self) -> tuple[int, ...]:
        """Return the host's core of each vCPU."""
        return tuple(cpu for cell in self.cells for cpu in cell.cpus)

    @property
    def is_head(self) -> bool:
        return self.number == 0


def guests_of(options: Options, host: int, cells: Sequence[Cell]) -> list[Guest]:
    """Return the guests of a host with these cores. Raises `ValueError` if they do not fit."""
    found = []
    for index, share in enumerate(shares(cells, options.guests, options.cpus)):
        number = host * options.guests + index
        names = options.hostname(number), options.address(number), options.mac(number)
        found.append(Guest(number, *names, share, options.memory_mib))
    return found


def parse_memory(text: str) -> int:
    """Convert ``"8G"`` to MiB. Raises `ValueError`."""
    match = re.fullmatch(r"(\d+)([MGT])(iB)?", text)
    if match is None:
        raise ValueError(f"--memory {text!r}: give a whole number and M, G or T, as in 8G")
    return int(match[1]) * UNITS[match[2]]


def split_memory(guest: Guest) -> list[int]:
    """Divide a guest's memory (MiB) among its cells by their cores, in whole huge pages."""
    pages, cpus = guest.memory_mib // PAGE_MIB, len(guest.cpus)
    found = [pages * len(cell.cpus) // cpus for cell in guest.cells]
    found[0] += pages - sum(found)
    return [PAGE_MIB * n for n in found]


def settings(options: Options, guest: Guest, token: str) -> str:
    """Return a guest's name, addresses and parameters of Ray."""
    everybody = range(options.hosts * options.guests)
    hosts = "\n".join(f"{options.address(n)} {options.hostname(n)}" for n in everybody)
    told = {
        "NAME": guest.name,
        "ADDRESS": f"{guest.address}/{options.net.prefixlen}",
        "IP": guest.address,
        "MTU": str(options.mtu),
        "ROLE": "head" if guest.is_head else "node",
        "HEAD": f"{options.address(0)}:{PORT}",
        "PORT": str(PORT),
        "CPUS": str(len(guest.cpus)),
        "STORE": str(int(guest.memory_mib * MEBI * STORE_SHARE)),
        "TOKEN": token,
        "HOSTS": hosts,
    }
    if options.static_arp:
        others = (number for number in everybody if number != guest.number)
        told["ARP"] = "\n".join(f"{options.address(n)} {options.mac(n)}" for n in others)
    if options.volume is not None:
        told["VOLUME"] = "/dev/vdb"
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in told.items())
