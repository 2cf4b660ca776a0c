"""The guests of a virtual cluster: options, cores by NUMA node, settings, libvirt's definitions."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from alchemist_ray.plural import counted

MEBI = 1 << 20
UNITS = {"M": 1, "G": 1 << 10, "T": 1 << 20}
PAGE_MIB = 2  # a huge page
RAY_PORT = 6379
STORE_SHARE = 0.25  # of a guest's memory, for Ray's object store
NODES = Path("/sys/devices/system/node")
CONFIG = "opt/org.alchemist/guest"  # the guest's settings, in QEMU's firmware configuration
CMDLINE = "console=ttyS0 quiet panic=-1"
KVM_CLOCK = "clocksource=kvm-clock"
QUEUE_LIMIT = 8


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
        MTU of the bridge (65520 on Ethernet over Aries, as in the report; 9000 on good Ethernet).
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
    head : str, optional
        ``host:port`` of a Ray that the guests join. Default: the first guest runs it.
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
    head: str | None = None

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

    @property
    def addresses(self) -> set[str]:
        """Return the addresses of all guests."""
        return {self.address(number) for number in range(self.hosts * self.guests)}

    def address(self, number: int) -> str:
        """Return the address of a guest, by its number in the cluster."""
        return str(self.net[self.first + number])

    def mac(self, number: int) -> str:
        """Return the hardware address of a guest: the last three bytes of its address."""
        last = [int(byte) for byte in self.address(number).split(".")[1:]]
        return "52:54:00:" + ":".join(f"{byte:02x}" for byte in last)

    @property
    def ray_address(self) -> str:
        """Return the address of the Ray that the guests belong to."""
        return self.head or f"{self.address(0)}:{RAY_PORT}"

    def hostname(self, number: int) -> str:
        return f"{self.name}-{number // self.guests}-{number % self.guests}"


@dataclass(frozen=True, slots=True)
class Cell:
    """Cores of one NUMA node."""

    node: int
    cpus: tuple[int, ...]


def parse_cpus(text: str) -> tuple[int, ...]:
    """Convert ``"0-3,8"`` to 0, 1, 2, 3, 8. Raises `ValueError`."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def format_cpus(cpus: Iterable[int]) -> str:
    """Convert 0, 1, 2, 3, 8 to ``"0-3,8"``."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse_cells(text: str) -> tuple[Cell, ...]:
    """Cells of a host that is not this one: ``"0-15;16-31"``, a NUMA node after the other.

    Raises
    ------
    ValueError
        If it is not of that form, or a core is in two of them.
    """
    try:
        cells = tuple(Cell(i, parse_cpus(part)) for i, part in enumerate(text.split(";")))
    except ValueError:
        raise ValueError(f"{text!r}: write cores by NUMA node as in 0-15;16-31") from None
    cpus = [cpu for cell in cells for cpu in cell.cpus]
    if not cpus or len(set(cpus)) < len(cpus):
        raise ValueError(f"{text!r}: give at least one core, and each core only once")
    return cells


def cells_here() -> tuple[Cell, ...]:
    """Return the cores that this process may use by NUMA node: in a job, the job's."""
    usable = os.sched_getaffinity(0)
    cells = []
    for path in sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        there = parse_cpus((path / "cpulist").read_text())
        if cpus := tuple(cpu for cpu in there if cpu in usable):
            cells.append(Cell(int(path.name[4:]), cpus))
    return tuple(cells) or (Cell(0, tuple(sorted(usable))),)


def shares(cells: Sequence[Cell], guests: int, cpus: int | None) -> list[tuple[Cell, ...]]:
    """Return the cores of each guest: equally many, in order, so that few guests span NUMA nodes.

    Parameters
    ----------
    cells : sequence of Cell
    guests : int
    cpus : int, optional
        Cores of each. Default: all, evenly.

    Raises
    ------
    ValueError
        If there are fewer.
    """
    every = [(cell.node, cpu) for cell in cells for cpu in cell.cpus]
    each = len(every) // guests if cpus is None else cpus
    if each < 1 or each * guests > len(every):
        raise ValueError(
            f"{counted(guests, 'guest')} of {counted(max(each, 1), 'core')} do not fit on a host "
            f"with {len(every)}: use fewer guests or cores; vCPUs do not share cores"
        )
    found = []
    for guest in range(guests):
        mine = every[guest * each : (guest + 1) * each]
        nodes = list(dict.fromkeys(node for node, _ in mine))
        found.append(tuple(Cell(node, tuple(c for n, c in mine if n == node)) for node in nodes))
    return found


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
    pages = guest.memory_mib // PAGE_MIB
    cpus = len(guest.cpus)
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
        "ROLE": "node" if options.head or guest.number else "head",
        "HEAD": options.ray_address,
        "PORT": str(RAY_PORT),
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


def domain(options: Options, guest: Guest, folder: Path) -> str:
    """The domain of a guest as XML.

    Parameters
    ----------
    options : Options
    guest : Guest
    folder : Path
        The host's, for the guest's settings and console.

    Notes
    -----
    The guest's processor is the host's; each vCPU is bound to a core, and the emulator's own
    threads to the same ones; memory is bound to the NUMA nodes of those cores, in huge pages, and
    the guest sees as many nodes; disk and network are virtio, or the network is a virtual function
    of a card. The root disk is shared and read-only: changes are in the guest's memory and end
    with it. A second disk, if asked for, is the guest's own and stays.
    """
    kvm = not options.emulate
    image = _quoted(options.image)
    own = _quoted(folder / guest.name)
    count = len(guest.cpus)
    cores = format_cpus(guest.cpus)
    pins = [f'<vcpupin vcpu="{vcpu}" cpuset="{cpu}"/>' for vcpu, cpu in enumerate(guest.cpus)]
    nodes, numa = _memory(guest)
    sockets = len(guest.cells) if count % len(guest.cells) == 0 else 1
    pages = '<hugepages><page size="2048" unit="KiB"/></hugepages>'
    # nosharepages: the host does not compare and merge guests' pages. kvmclock: a read of the time
    # does not leave the guest. Queues of the network: by vhost, where the kernel has it.
    root = ET.fromstring(f"""
<domain type="{"kvm" if kvm else "qemu"}">
  <name>{guest.name}</name>
  <memory unit="MiB">{guest.memory_mib}</memory>
  <memoryBacking><nosharepages/>{pages if options.huge_pages and kvm else ""}</memoryBacking>
  <vcpu placement="static">{count}</vcpu>
  <cputune>{"".join(pins)}<emulatorpin cpuset="{cores}"/></cputune>
  <numatune>
    <memory mode="strict" nodeset="{format_cpus(cell.node for cell in guest.cells)}"/>
    {nodes}
  </numatune>
  <sysinfo type="fwcfg"><entry name="{CONFIG}" file="{own}.conf"/></sysinfo>
  <os>
    <type arch="x86_64" machine="q35">hvm</type>
    <kernel>{image}/vmlinuz</kernel>
    <initrd>{image}/initrd.gz</initrd>
    <cmdline>{f"{CMDLINE} {KVM_CLOCK}" if kvm else CMDLINE}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu {'mode="host-model" check="partial"' if kvm else 'mode="maximum"'}>
    <topology sockets="{sockets}" cores="{count // sockets}" threads="1"/>
    <numa>{numa}</numa>
  </cpu>
  <clock offset="utc">
    {'<timer name="kvmclock" present="yes"/>' if kvm else ""}
    <timer name="hpet" present="no"/>
  </clock>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <disk type="file" device="disk">
      <driver name="qemu" type="raw" cache="writeback"/>
      <source file="{image}/root.img"/>
      <target dev="vda" bus="virtio"/>
      <readonly/>
    </disk>
    {_disk(options, guest)}
    {_network(options, guest)}
    <serial type="file"><source path="{own}.log"/></serial>
    <rng model="virtio"><backend model="random">/dev/urandom</backend></rng>
    <memballoon model="none"/>
  </devices>
</domain>""")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _quoted(text: object) -> str:
    return escape(str(text), {'"': "&quot;"})


def _memory(guest: Guest) -> tuple[str, str]:
    """The host's NUMA node of each of the guest's nodes; its vCPUs and memory."""
    hosts = numa = ""
    first = 0
    for number, (cell, mib) in enumerate(zip(guest.cells, split_memory(guest), strict=True)):
        hosts += f'<memnode cellid="{number}" mode="strict" nodeset="{cell.node}"/>'
        vcpus = format_cpus(range(first, first + len(cell.cpus)))
        numa += f'<cell id="{number}" cpus="{vcpus}" memory="{mib}" unit="MiB"/>'
        first += len(cell.cpus)
    return hosts, numa


def _network(options: Options, guest: Guest) -> str:
    if options.sriov is not None:  # libvirt takes a free virtual function from the pool
        return f"""
    <interface type="network">
      <mac address="{guest.mac}"/>
      <source network="{_quoted(options.sriov)}"/>
    </interface>"""
    count = len(guest.cpus)
    queues = f'<driver queues="{min(count, QUEUE_LIMIT)}"/>' if count > 1 else ""
    return f"""
    <interface type="bridge">
      <mac address="{guest.mac}"/>
      <source bridge="{_quoted(options.bridge)}"/>
      <model type="virtio"/>
      {"" if options.emulate else queues}
      <mtu size="{options.mtu}"/>
    </interface>"""


def _disk(options: Options, guest: Guest) -> str:
    """The guest's own disk, if one is asked for."""
    if options.volume is None:
        return ""
    return f"""
    <disk type="file" device="disk">
      <driver name="qemu" type="raw" cache="none" io="native"/>
      <source file="{_quoted(volume_of(options, guest))}"/>
      <target dev="vdb" bus="virtio"/>
    </disk>"""


def volume_of(options: Options, guest: Guest) -> Path:
    """Return the file of a guest's persistent disk, on its host."""
    return Path(options.volume or ".") / f"{guest.name}.img"
