"""Definitions for both ends of a connection to a gateway: addresses, versions, sizes."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from alchemist_ray.errors import SessionError
from mpi_workers.matrix.node_shares import Region

PORT = 24960  # the port in the paper's listing
SCHEME = "alchemist"
OLDEST_PROTOCOL, PROTOCOL = 1, 1  # versions of what follows the handshake that this side speaks
GRACE_S = 75.0  # how long a client that lost its connection keeps its matrices and its gang
# 32 MiB: the part of a matrix in one frame. Smaller ones cost more: the nodes map memory for each.
CHUNK_NBYTES = 32 << 20
MIN_LINES = 64  # fewest rows of a chunk (columns, if Fortran-ordered), if there are that many
WINDOW = 4  # chunks that are sent before the first is acknowledged
MAX_STREAMS = 4  # data connections of one transfer
MAP_LIMIT = 16 << 20  # 16 MiB: largest map of a client that may not run code of its own
FINGERPRINT = re.compile(r"([0-9A-Fa-f]{2}:?){31}[0-9A-Fa-f]{2}")
# What clients learn of a `GangAddress`, without secrets and addresses of the cluster.
DESCRIBED = ("gang", "session", "epoch", "first_epoch", "incarnation", "shared", "idle_timeout_s")
SCOPES = ("call", "run_code", "files", "admin")


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The address of a gateway: ``alchemist://host:port?option=value&...``.

    Attributes
    ----------
    host : str
    port : int
    tls : bool
        Off only for a gateway on this machine.
    fingerprint : str
        SHA-256 of the gateway's certificate, in hexadecimal. Empty: the token proves the gateway.
    cafile : str
        Certificates of authorities that must have signed the gateway's. Empty: none has to.
    streams : int
        Data connections of one transfer.
    """

    host: str
    port: int = PORT
    tls: bool = True
    fingerprint: str = ""
    cafile: str = ""
    streams: int = 2

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}://{host}:{self.port}" + ("" if self.tls else "?tls=off")

    @classmethod
    def parse(cls, text: str) -> GatewayAddress:
        """Raises `SessionError` if it is not the address of a gateway."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port or PORT
        except ValueError as error:
            raise SessionError(f"{text!r} is not the address of a gateway: {error}") from None
        if parts.scheme != SCHEME or not host or parts.path.strip("/"):
            raise SessionError(
                f"{text!r} is not the address of a gateway, which has the form "
                "alchemist://host:port"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        return cls(host, port, **_checked(options, host, text))


def _checked(options: Mapping[str, str], host: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in options.items():
        match key, value:
            case "tls", "on" | "off":
                found["tls"] = value == "on"
            case "streams", ("1" | "2" | "3" | "4"):
                found["streams"] = int(value)
            case "fingerprint", _ if FINGERPRINT.fullmatch(value):
                found["fingerprint"] = value.lower().replace(":", "")
            case "cafile", _ if value:
                found["cafile"] = value
            case (("fingerprint" | "cafile"), _):  # e.g. of a variable that is not set
                wanted = "a file" if key == "cafile" else "64 hexadecimal digits"
                raise SessionError(f"{text!r}: {key} must be {wanted}; got {value!r}")
            case _:
                raise SessionError(
                    f"{text!r}: unknown option {key}={value}; options are tls=on|off, streams=1 to "
                    f"{MAX_STREAMS}, fingerprint=..., cafile=..."
                )
    if found.get("tls") is False and not is_loopback(host):
        raise SessionError(f"{text!r}: without TLS only a gateway on this machine can be used")
    return found


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def chunks(
    region: Region,
    itemsize: int,
    order: str,
    limit_nbytes: int | None = None,
    min_lines: int = MIN_LINES,
) -> Iterator[Region]:
    """Cut a region into parts of at most `limit_nbytes`, contiguous in the given order.

    A part has whole rows ("C") or columns ("F") where `min_lines` of them fit. Default of the
    limit: `CHUNK_NBYTES`.
    """
    limit_nbytes = limit_nbytes or CHUNK_NBYTES
    rows, cols = (region.row0, region.row1), (region.col0, region.col1)
    lines, length = (rows, cols) if order == "C" else (cols, rows)
    width = max(1, min(length[1] - length[0], limit_nbytes // (itemsize * min_lines)))
    height = max(1, limit_nbytes // (itemsize * width))
    for first in range(lines[0], lines[1], height):
        last = min(first + height, lines[1])
        for start in range(length[0], length[1], width):
            stop = min(start + width, length[1])
            if order == "C":
                yield Region(first, last, start, stop)
            else:
                yield Region(start, stop, first, last)
