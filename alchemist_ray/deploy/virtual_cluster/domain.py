"""libvirt's definition of a guest, with the tuning of the report."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from alchemist_ray.deploy.virtual_cluster.options import Guest, Options, split_memory
from alchemist_ray.deploy.virtual_cluster.topology import format_cpus

CONFIG = "opt/org.alchemist/guest"  # the guest's settings, in QEMU's firmware configuration
CMDLINE = "console=ttyS0 quiet panic=-1"
KVM_CLOCK = "clocksource=kvm-clock"
QUEUE_LIMIT = 8


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
    image = Path(options.image)
    root = ET.Element("domain", type="qemu" if options.emulate else "kvm")
    _text(root, "name", guest.name)
    _text(root, "memory", str(guest.memory_mib), unit="MiB")
    backing = ET.SubElement(root, "memoryBacking")
    ET.SubElement(backing, "nosharepages")  # the host does not compare and merge guests' pages
    if options.huge_pages and not options.emulate:
        pages = ET.SubElement(backing, "hugepages")
        ET.SubElement(pages, "page", size="2048", unit="KiB")
    _text(root, "vcpu", str(len(guest.cpus)), placement="static")
    tuning = ET.SubElement(root, "cputune")
    for vcpu, cpu in enumerate(guest.cpus):
        ET.SubElement(tuning, "vcpupin", vcpu=str(vcpu), cpuset=str(cpu))
    ET.SubElement(tuning, "emulatorpin", cpuset=format_cpus(guest.cpus))
    nodes = ET.SubElement(root, "numatune")
    nodeset = format_cpus(cell.node for cell in guest.cells)
    ET.SubElement(nodes, "memory", mode="strict", nodeset=nodeset)
    for number, cell in enumerate(guest.cells):
        ET.SubElement(nodes, "memnode", cellid=str(number), mode="strict", nodeset=str(cell.node))
    info = ET.SubElement(root, "sysinfo", type="fwcfg")
    ET.SubElement(info, "entry", name=CONFIG, file=str(folder / f"{guest.name}.conf"))
    system = ET.SubElement(root, "os")
    _text(system, "type", "hvm", arch="x86_64", machine="q35")
    _text(system, "kernel", str(image / "vmlinuz"))
    _text(system, "initrd", str(image / "initrd.gz"))
    _text(system, "cmdline", CMDLINE if options.emulate else f"{CMDLINE} {KVM_CLOCK}")
    ET.SubElement(ET.SubElement(root, "features"), "acpi")
    _processor(root, options, guest)
    _clock(root, options)
    for event in ("on_poweroff", "on_reboot", "on_crash"):
        _text(root, event, "destroy")
    _devices(root, options, guest, folder)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _processor(root: ET.Element, options: Options, guest: Guest) -> None:
    mode = {"mode": "maximum"} if options.emulate else {"mode": "host-model", "check": "partial"}
    cpu = ET.SubElement(root, "cpu", mode)
    count = len(guest.cpus)
    sockets = len(guest.cells) if count % len(guest.cells) == 0 else 1
    ET.SubElement(cpu, "topology", sockets=str(sockets), cores=str(count // sockets), threads="1")
    numa = ET.SubElement(cpu, "numa")
    first = 0
    for number, (cell, mib) in enumerate(zip(guest.cells, split_memory(guest), strict=True)):
        vcpus = format_cpus(range(first, first + len(cell.cpus)))
        ET.SubElement(numa, "cell", id=str(number), cpus=vcpus, memory=str(mib), unit="MiB")
        first += len(cell.cpus)


def _clock(root: ET.Element, options: Options) -> None:
    """The paravirtual clock: a read of the time does not leave the guest. QEMU has none."""
    clock = ET.SubElement(root, "clock", offset="utc")
    if not options.emulate:
        ET.SubElement(clock, "timer", name="kvmclock", present="yes")
    ET.SubElement(clock, "timer", name="hpet", present="no")


def _devices(root: ET.Element, options: Options, guest: Guest, folder: Path) -> None:
    devices = ET.SubElement(root, "devices")
    disk = ET.SubElement(devices, "disk", type="file", device="disk")
    ET.SubElement(disk, "driver", name="qemu", type="raw", cache="writeback")
    ET.SubElement(disk, "source", file=str(Path(options.image) / "root.img"))
    ET.SubElement(disk, "target", dev="vda", bus="virtio")
    ET.SubElement(disk, "readonly")
    if options.volume is not None:
        disk = ET.SubElement(devices, "disk", type="file", device="disk")
        ET.SubElement(disk, "driver", name="qemu", type="raw", cache="none", io="native")
        ET.SubElement(disk, "source", file=str(volume_of(options, guest)))
        ET.SubElement(disk, "target", dev="vdb", bus="virtio")
    _link(devices, options, guest)
    serial = ET.SubElement(devices, "serial", type="file")
    ET.SubElement(serial, "source", path=str(folder / f"{guest.name}.log"))
    rng = ET.SubElement(devices, "rng", model="virtio")
    _text(rng, "backend", "/dev/urandom", model="random")
    ET.SubElement(devices, "memballoon", model="none")


def _link(devices: ET.Element, options: Options, guest: Guest) -> None:
    if options.sriov is not None:  # libvirt takes a free virtual function from the pool
        link = ET.SubElement(devices, "interface", type="network")
        ET.SubElement(link, "mac", address=guest.mac)
        ET.SubElement(link, "source", network=options.sriov)
        return
    link = ET.SubElement(devices, "interface", type="bridge")
    ET.SubElement(link, "mac", address=guest.mac)
    ET.SubElement(link, "source", bridge=options.bridge)
    ET.SubElement(link, "model", type="virtio")
    if not options.emulate and len(guest.cpus) > 1:  # by vhost, where the kernel has it
        ET.SubElement(link, "driver", queues=str(min(len(guest.cpus), QUEUE_LIMIT)))
    ET.SubElement(link, "mtu", size=str(options.mtu))


def volume_of(options: Options, guest: Guest) -> Path:
    """Return the file of a guest's persistent disk, on its host."""
    return Path(options.volume or ".") / f"{guest.name}.img"


def _text(parent: ET.Element, tag: str, text: str, **attributes: str) -> None:
    ET.SubElement(parent, tag, attributes).text = text
