"""PMI-1, the protocol by which MPICH's ranks find each other: the node's half of the server.

This module does no input or output itself: it gets lines and returns lines. A node answers its own
ranks. Only a barrier goes up to the GroupManager, with the keys that were put before it, and comes
down when all nodes have reached it: the manager gets messages per node, not per rank.

Source: "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems",
Balaji et al., EuroMPI 2010; wire protocol 1.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from itertools import groupby

VALUE_LIMIT = 1024  # bytes of a value
NO_SPAWN = (
    "MPI_Comm_spawn is refused: a gang has a fixed number of ranks. Open a session with more "
    "workers, and divide them with MPI_Comm_split; mpi4py.futures.MPICommExecutor does so"
)


def process_mapping(counts: list[int]) -> str:
    """MPICH's description of which ranks share a node.

    Parameters
    ----------
    counts : list of int
        Ranks per node, in order. Neighbours with equal counts share one entry, ``(first node,
        nodes, ranks per node)``: a value of PMI-1 has at most 1024 bytes.
    """
    entries, node = [], 0
    for count, nodes in ((count, len(list(same))) for count, same in groupby(counts)):
        entries.append(f"({node},{nodes},{count})")
        node += nodes
    return f"(vector,{','.join(entries)})"


def segment_names(kvs_name: str, node: int) -> tuple[str, ...]:
    """Files that MPICH creates in /dev/shm for a job of this name, and leaves when it is killed."""
    world = 2166136261  # FNV-1a
    for byte in kvs_name.encode():
        world = (world ^ byte) * 16777619 & 0xFFFFFFFF
    return f"mpich_shm_{world:x}_{node}", f"mpich_vci_{world:x}_{node}"


@dataclass(eq=False)
class PmiNode:
    """Answers the PMI lines of one node's ranks.

    Attributes
    ----------
    kvs_name : str
        Unique name of the job: MPICH derives shared memory names from it.
    size, local_ranks : int, list of int
        Ranks in all, and the ranks on this node.
    mapping : str
        See `process_mapping`.
    send : callable(rank, line)
        Sends a line to a rank.
    barrier : callable(puts)
        All local ranks have reached a barrier; `puts` are the keys put since the last.
    abort : callable(rank, code)
        A rank called MPI_Abort.
    say : callable(rank, text)
        Prints a line as the rank would.
    """

    kvs_name: str
    size: int
    local_ranks: list[int]
    mapping: InitVar[str]
    _: KW_ONLY
    send: Callable[[int, str], None]
    barrier: Callable[[dict[str, str]], None]
    abort: Callable[[int, int], None]
    say: Callable[[int, str], object]
    _keys: dict[str, str] = field(default_factory=dict)
    _fresh: dict[str, str] = field(default_factory=dict)
    _waiting: int = 0
    _spawning: set[int] = field(default_factory=set)

    def __post_init__(self, mapping: str) -> None:
        if len(mapping) < VALUE_LIMIT:  # if it is missing, MPICH compares host names
            self._keys["PMI_process_mapping"] = mapping

    def release(self, puts: dict[str, str]) -> None:
        """Every node has reached the barrier: add the keys of all nodes, and release the ranks."""
        self._keys.update(puts)
        self._waiting = 0
        for rank in self.local_ranks:
            self.send(rank, "cmd=barrier_out rc=0")

    def line(self, rank: int, line: str) -> None:
        """Answer one line of a rank."""
        if line.startswith("mcmd=spawn"):
            self._spawning.add(rank)
        if rank in self._spawning:  # a request of many lines
            if line.strip() == "endcmd":
                self._spawning.discard(rank)
                self.say(rank, NO_SPAWN)
                self.send(rank, "cmd=spawn_result rc=-1 msg=not_supported")
            return
        fields = dict(token.partition("=")[::2] for token in line.split())
        constant = {
            "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": f"maxes kvsname_max=256 keylen_max=64 vallen_max={VALUE_LIMIT} rc=0",
            "get_appnum": "appnum appnum=0 rc=0",
            "get_my_kvsname": f"my_kvsname kvsname={self.kvs_name} rc=0",
            "get_universe_size": f"universe_size size={self.size} rc=0",
            "finalize": "finalize_ack rc=0",
        }
        match fields.get("cmd"):
            case str(command) if command in constant:
                self.send(rank, f"cmd={constant[command]}")
            case "put":
                self._fresh[fields["key"]] = line.partition("value=")[2].rstrip("\n")
                self.send(rank, "cmd=put_result rc=0")
            case "get":
                key = fields["key"]
                value = self._fresh.get(key, self._keys.get(key))
                self.send(
                    rank,
                    f"cmd=get_result rc=0 value={value}"
                    if value is not None
                    else f"cmd=get_result rc=-1 msg=key_{key}_not_found value=unknown",
                )
            case "barrier_in":
                self._waiting += 1
                if self._waiting == len(self.local_ranks):
                    puts, self._fresh = self._fresh, {}
                    self.barrier(puts)
            case "abort":
                self.abort(rank, int(fields.get("exitcode", "1")))
            case command:
                self.send(rank, f"cmd={command} rc=-1 msg=not_supported")
