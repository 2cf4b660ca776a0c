"""A file by which a client learns whether it is on the data endpoint's node.

A JVM (Java 8 has no Unix sockets) maps the ranks' memory by its path below ``/proc``. On another
node, or in another container, the path may exist and be another file: a client first reads the
nonce from a file of the endpoint. The file has no name, and ends with the process.
"""

from __future__ import annotations

import os
import secrets

NONCE_BYTES = 16


class NodeProof:
    """A file of this process that holds a random nonce."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._fd = os.memfd_create("alchemist-node", os.MFD_CLOEXEC)
        os.write(self._fd, self.nonce)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"
