"""A test of KVM: it runs a virtual machine of a single instruction.

``/dev/kvm`` says little, and so does a machine that can be made: where the processor itself has no
virtualization (many a cloud machine) guests may begin to boot and then stand still without a word.

    python -m alchemist_ray.deploy.virtual_cluster.kvm      exit code 0 if it does
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

DEVICE = Path("/dev/kvm")
LIMIT_S = 5.0
# linux/kvm.h, x86-64
GET_API_VERSION, CREATE_VM, GET_VCPU_MMAP_SIZE = 0xAE00, 0xAE01, 0xAE04
CREATE_VCPU, RUN = 0xAE41, 0xAE80
SET_USER_MEMORY_REGION, SET_REGS = 0x4020AE46, 0x4090AE82
GET_SREGS, SET_SREGS = 0x8138AE83, 0x4138AE84
VERSION, EXIT_HLT, EXIT_REASON_AT = 12, 5, 8
SREGS_NBYTES, REGS_NBYTES, RIP_AT, CS_SELECTOR_AT = 0x138, 0x90, 0x80, 12
EXTENSION = re.compile(r"^flags\s*:.*\b(vmx|svm)\b", re.MULTILINE)
HLT, RFLAGS = b"\xf4", 2


def works() -> bool:
    """Return whether a guest runs; the test is a process that may take at most `LIMIT_S`."""
    if not (os.access(DEVICE, os.R_OK | os.W_OK) and has_extensions()):
        return False
    try:
        done = subprocess.run(
            [sys.executable, "-S", __file__],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def has_extensions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor has Intel's or AMD's virtualization."""
    return EXTENSION.search(cpuinfo.read_text()) is not None


def halts() -> bool:
    """Run a machine that halts at once. Raises `OSError` if that fails."""
    kvm = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    if fcntl.ioctl(kvm, GET_API_VERSION, 0) != VERSION:
        return False
    machine = fcntl.ioctl(kvm, CREATE_VM, 0)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    memory[: len(HLT)] = HLT
    where = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fcntl.ioctl(
        machine, SET_USER_MEMORY_REGION, struct.pack("=IIQQQ", 0, 0, 0, mmap.PAGESIZE, where)
    )
    cpu = fcntl.ioctl(machine, CREATE_VCPU, 0)
    state = mmap.mmap(cpu, fcntl.ioctl(kvm, GET_VCPU_MMAP_SIZE, 0))
    special = bytearray(SREGS_NBYTES)
    fcntl.ioctl(cpu, GET_SREGS, special)
    # Code begins at 0: base (8 bytes), limit (4) and selector (2) of the code segment.
    special[:8] = bytes(8)
    special[CS_SELECTOR_AT : CS_SELECTOR_AT + 2] = bytes(2)
    fcntl.ioctl(cpu, SET_SREGS, bytes(special))
    registers = bytearray(REGS_NBYTES)
    struct.pack_into("=QQ", registers, RIP_AT, 0, RFLAGS)
    fcntl.ioctl(cpu, SET_REGS, bytes(registers))
    fcntl.ioctl(cpu, RUN, 0)
    return bool(struct.unpack_from("=I", state, EXIT_REASON_AT)[0] == EXIT_HLT)


if __name__ == "__main__":
    try:
        sys.exit(0 if halts() else 1)
    except OSError as error:
        sys.exit(f"{DEVICE}: {error}")
