"""Asks a Ray head for its version before this process joins it, with a time limit.

`ray.init` of an address that is dead, of another version or behind a token takes a minute, or
ends the process. These are two gRPC calls to the GCS.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import grpc
import ray._raylet
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

PROBE_TIMEOUT_S = 4.0
_messages: Any = gcs_service_pb2  # made at import time: type checkers do not see them
_native: Any = ray._raylet
OPTIONS = (("grpc.enable_http_proxy", 0),)  # as Ray's own: a site's proxy does not reach its nodes
METADATA_NAMESPACE, METADATA_KEY = b"cluster", b"CLUSTER_METADATA"


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The answer of a Ray head; `error` is empty if it answered."""

    ray_version: str = ""
    python_version: str = ""
    wants_token: bool = False
    error: str = ""


def probe(address: str) -> ClusterFacts:
    """Ask the head whose GCS listens at ``host:port``. Takes `PROBE_TIMEOUT_S` at most."""
    with grpc.insecure_channel(address, OPTIONS) as channel:
        values = gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel)
        request = _messages.InternalKVGetRequest(namespace=METADATA_NAMESPACE, key=METADATA_KEY)
        try:
            reply = values.InternalKVGet(request, timeout=PROBE_TIMEOUT_S, metadata=_token())
            facts = json.loads(reply.value)
            return ClusterFacts(facts["ray_version"], facts["python_version"])
        except grpc.RpcError as error:
            refused = error.code() == grpc.StatusCode.UNAUTHENTICATED
            return ClusterFacts(wants_token=refused, error="" if refused else _reason(error))
        except (ValueError, KeyError, TypeError):
            return ClusterFacts(error="it has no metadata of a cluster")


def _reason(error: grpc.RpcError) -> str:
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer in {PROBE_TIMEOUT_S:.0f} s"
    return str(error.details()).rpartition(": ")[2] or str(error.code())


def _token() -> tuple[tuple[str, str], ...]:
    """Ray's token as call metadata, as far as this process has one."""
    loader = _native.AuthenticationTokenLoader.instance()
    if not loader.has_token():
        return ()
    return tuple((str(k).lower(), v) for k, v in loader.get_token_for_http_header().items())
