"""The proxy: one process per gang and node, between the GroupManager and the ranks.

It starts the node's ranks (forked from a warm interpreter, or through a site's
launcher), speaks PMI with them, passes commands down and one combined reply up,
and notices when a rank ends. Its connection to the GroupManager is the gang's
life line: when it breaks, the ranks are killed and nothing is left behind.

Single-threaded, so that the kernel ties the ranks' lives to it (PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import uvloop
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution, default_grid
from mpi_workers.node.cleanup import GangFolder, memory_shortage
from mpi_workers.node.pmi import PmiNode, process_mapping
from mpi_workers.node.processes import LocalRanks, Speaker
from mpi_workers.node.specs import ProxySpec, RankConfig
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.asynchronous import ConnectingProtocol, FrameProtocol, protocol_factory
from mpi_workers.wire.frames import Body, Frame, Kind, WireError

EXIT_GRACE_S = 1.0  # how long ranks may take to leave when asked
REAP_S = 0.02  # between looks at processes that are about to end
TOLD_OF_RANKS = ("rank", "size", "pid", "hostname", "addresses", "mpi")
ERRORS_TOLD = 4  # failing ranks whose tracebacks travel
SPEECH_S = 0.01  # lines that ranks print are told in batches
SPEECH_BACKLOG = 1 << 20  # 1 MiB: more is not sent before the GroupManager has read it
NUDGE_S = 0.5  # between signals to a rank that works on in a call that was cancelled


class Pending:
    """A command under way on this node: replies so far."""

    def __init__(self, body: Body, ranks: Iterable[int]) -> None:
        self.body = body
        self.left = set(ranks)
        self.errors: list[Body] = []
        self.interrupted = 0
        self.value: Any = None
        self.matrices: list[Any] | None = None
        self.idle = 0


class Proxy:
    """One node's part of a gang."""

    def __init__(self, spec: ProxySpec, run_rank: Callable[[RankConfig], None]) -> None:
        self._spec = spec
        self._folder = GangFolder(spec.gang, spec.kvs_name, spec.node)
        self._local = LocalRanks(spec)
        self._ranks = self._local.by_rank
        self._pending: dict[int, Pending] = {}
        self._manager: FrameProtocol | None = None
        self._pmi: PmiNode | None = None
        self._server: asyncio.AbstractServer | None = None  # uvloop closes one that nobody holds
        self._silent: set[int] = set()  # ranks whose PMI sockets are closed: they are ending
        self._leaving = False
        self._speech: asyncio.TimerHandle | None = None
        self._farewell: asyncio.Future[None] | None = None
        self._over: asyncio.Event | None = None
        crowded = len(self._ranks) * spec.threads > len(os.sched_getaffinity(0))
        self._listener, control = sockets.listen_unix(self._folder.socket("control"))
        self._folder.note_pid()
        config = RankConfig(
            token=spec.token,
            directory=str(self._folder.path),
            control=control,
            size=spec.size,
            host=spec.host,
            threads=spec.threads,
            crowded=crowded,
            keep_bytes=spec.keep_bytes // max(1, len(self._ranks)),
            start_timeout_s=spec.start_timeout_s,
            advice=spec.start_advice,
        )
        # Spinning ranks that share cores starve each other; a yield costs little.
        os.environ["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1" if crowded else "0"
        for name in ("OMP", "OPENBLAS", "MKL"):
            os.environ[f"{name}_NUM_THREADS"] = str(spec.threads)
        self._local.start(config, self._folder.path, run_rank)

    # --- the loop ---

    async def serve(self) -> None:
        """Be the gang's proxy until the gang ends."""
        loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        for speaker, pipe in self._local.pipes.items():
            os.set_blocking(pipe, False)
            loop.add_reader(pipe, self._listen, speaker)
        self._server = await loop.create_unix_server(
            protocol_factory(self._from_rank, self._rank_lost, self._spec.token, self._rank_hello),
            sock=self._listener,
        )
        if not await self._reach_manager():
            return
        loop.add_signal_handler(signal.SIGTERM, self._told_to_go)
        if self._local.forked:
            self._pmi = PmiNode(
                self._spec.kvs_name,
                self._spec.size,
                self._spec.local_ranks,
                process_mapping(self._spec.counts),
                send=self._to_pmi,
                barrier=lambda puts: self._event("pmi_barrier", puts=puts),
                abort=lambda rank, code: self._rank_ended(rank, f"called MPI_Abort({code})"),
            )
            for rank, sock in self._local.pmi.items():
                sock.setblocking(False)
                loop.add_reader(sock, self._from_pmi, rank, bytearray())
        self._reap()
        await self._over.wait()

    async def _reach_manager(self) -> bool:
        def on_frame(protocol: FrameProtocol, frame: Frame) -> None:
            if frame.kind == Kind.COMMAND:
                self._command(frame.body)
            elif frame.kind == Kind.REFUSED:
                self._stop()

        fields = {"role": "proxy", "node": self._spec.node}
        manager = ConnectingProtocol(on_frame, lambda _: self._stop(), self._spec.token, fields)
        try:
            sock = sockets.dial(sockets.reachable_addresses(self._spec.manager)[0])
            sock.setblocking(False)
            await asyncio.get_running_loop().create_connection(lambda: manager, sock=sock)
            await manager.welcome
        except (OSError, IndexError, WireError, Failure) as error:
            print(f"cannot reach the GroupManager at {self._spec.manager}: {error}")
            return False
        self._manager = manager
        return True

    def _event(self, op: str, **fields: Any) -> None:
        if self._manager is not None:
            self._manager.send(Kind.EVENT, {"op": op, "node": self._spec.node, **fields})

    # --- PMI ---

    def _to_pmi(self, rank: int, line: str) -> None:
        with contextlib.suppress(OSError):  # the rank is gone: its end is reported elsewhere
            self._local.pmi[rank].send((line + "\n").encode())

    def _from_pmi(self, rank: int, buffer: bytearray) -> None:
        try:
            data = self._local.pmi[rank].recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            # Only the rank itself holds the other end: it has ended.
            asyncio.get_running_loop().remove_reader(self._local.pmi[rank])
            self._silent.add(rank)
            self._reap()
            return
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            line = buffer[:end].decode(errors="replace")
            del buffer[: end + 1]
            if self._pmi is not None:
                self._pmi.line(rank, line)

    # --- ranks ---

    def _rank_hello(self, protocol: FrameProtocol, body: Body) -> Body:
        process = self._ranks.get(body["rank"])
        if unfit := body.get("unfit"):
            self._rank_ended(next(iter(self._ranks)), unfit, pid=body["pid"])
            return {}
        if process is None or process.control is not None:
            raise Failure(
                "LaunchError",
                f"rank {body['rank']} was started on {os.uname().nodename}, which has ranks "
                f"{list(self._ranks)}: the launcher has put ranks on other nodes than it was told",
            )
        process.hello = {key: body[key] for key in TOLD_OF_RANKS}
        process.pid = int(body["pid"])
        if not self._local.forked:
            self._folder.add_segments(body["segments"])
        process.control = protocol
        protocol.peer = process
        if all(other.control is not None for other in self._ranks.values()):
            if not self._local.forked:
                self._folder.learn_segments(self._local.pids())
            self._folder.unlink_segments()  # all have attached: the names are not needed
            self._event("ready", ranks=[p.hello for p in self._ranks.values()])
        return {}

    def _rank_lost(self, protocol: FrameProtocol) -> None:
        if not self._local.forked and protocol.peer is not None:
            self._rank_ended(protocol.peer.rank, "ended")

    def _listen(self, speaker: Speaker) -> None:
        loop = asyncio.get_running_loop()
        if not self._local.listen(speaker):
            loop.remove_reader(self._local.pipes[speaker])
        if self._speech is None and self._local.lines:
            self._speech = loop.call_later(SPEECH_S, self._speak)

    def _speak(self, *, finished: bool = False) -> None:
        """Pass on what ranks have printed: to who waits for a command, else to our own log."""
        if self._speech is not None:
            self._speech.cancel()
            self._speech = None
        lines = self._local.lines
        transport = self._manager.transport if self._manager is not None else None
        behind = transport is not None and transport.get_write_buffer_size() > SPEECH_BACKLOG
        if behind and not finished:
            loop = asyncio.get_running_loop()
            self._speech = loop.call_later(SPEECH_S, self._speak)
        elif not lines:
            return
        elif self._pending:
            self._event("output", seq=max(self._pending), lines=lines.take())
        else:
            self._log()

    def _log(self) -> None:
        for rank, _, text in self._local.lines.take():
            print(f"[rank {rank}] {text}" if rank >= 0 else text, flush=True)

    def _reap(self) -> None:
        for rank, cause in self._local.ended():
            self._rank_ended(rank, cause)
        # A rank's sockets close a moment before it can be waited for; a launcher has none here.
        if not self._leaving and (self._silent or self._local.launching):
            asyncio.get_running_loop().call_later(REAP_S, self._reap)

    def _rank_ended(self, rank: int, cause: str, pid: int | None = None) -> None:
        if self._leaving:
            return
        tail = self._local.last_words(rank)
        self._speak(finished=True)
        self._event(
            "rank_ended",
            rank=rank,
            cause=cause,
            hostname=os.uname().nodename,
            pid=pid or self._ranks[rank].pid or 0,
            tail=tail,
        )
        self._stop()

    # --- commands ---

    def _command(self, body: Body) -> None:
        match body["op"]:
            case "pmi_release":
                if self._pmi is not None:
                    self._pmi.release(body["puts"])
            case "interrupt":
                self._folder.word.raise_to(body["seq"])
                if body.get("signal"):
                    self._nudge(body["seq"])
            case "unstage":
                self._folder.remove_files(body["names"])
            case "shutdown":
                self._farewell = asyncio.ensure_future(self._shutdown())
            case "reserve" if self._shortage(body, 0) is None:
                self._reply(body["seq"], Pending(body, ()))  # plenty: no rank need wake for it
            case _:
                self._pending[body["seq"]] = Pending(body, self._ranks)
                data = frames.encode(Kind.COMMAND, body)
                for process in self._ranks.values():
                    if process.control is not None and process.control.transport is not None:
                        process.control.transport.write(data)

    def _from_rank(self, protocol: FrameProtocol, frame: Frame) -> None:
        body = frame.body
        if frame.kind == Kind.EVENT:
            self._event("progress", **body)
            return
        pending = self._pending.get(body.get("seq", -1))
        if frame.kind != Kind.REPLY or pending is None:
            return
        rank = protocol.peer.rank
        pending.left.discard(rank)
        if "error" in body:
            pending.errors.append(body["error"])
            if len(pending.errors) == 1 and pending.left:
                # The others may be waiting for this rank inside MPI: let them go.
                self._folder.word.raise_to(body["seq"])
            if len(pending.errors) == 1:
                self._local.hear_out(rank)  # what it has said before its reply
                self._speak(finished=True)
                self._event("rank_failed", seq=body["seq"], error=body["error"])
        elif body.get("interrupted"):
            pending.interrupted += 1
        else:
            if "value" in body:
                pending.value = body["value"]
            pending.idle += body.get("idle", 0)
            self._agree(pending, rank, body.get("matrices"))
        if not pending.left:
            self._local.hear_out()
            self._speak(finished=True)
            del self._pending[body["seq"]]
            self._reply(body["seq"], pending)

    def _nudge(self, seq: int) -> None:
        """Signal the ranks that are not back from a cancelled call, until they are."""
        pending = self._pending.get(seq)
        if pending is None or self._leaving:
            return
        for rank in pending.left:
            pid = self._ranks[rank].pid
            if pid:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGINT)
        asyncio.get_running_loop().call_later(NUDGE_S, self._nudge, seq)

    def _agree(self, pending: Pending, rank: int, matrices: list[Any] | None) -> None:
        if pending.matrices is None:
            pending.matrices = matrices or []
        elif pending.matrices != (matrices or []):
            pending.errors.append(
                Failure(
                    "RoutineError",
                    f"rank {rank} returned matrices of other shapes or layouts than its "
                    "neighbours: every rank must return the same matrices",
                    rank=rank,
                ).to_map()
            )

    def _shortage(self, body: Body, idle_bytes: int) -> Failure | None:
        return memory_shortage(
            Distribution(body["layout"], tuple(body["shape"]), default_grid(self._spec.size)),
            body["dtype"],
            self._spec.local_ranks,
            idle_bytes,
        )

    def _reply(self, seq: int, pending: Pending) -> None:
        if pending.body["op"] == "reserve" and not pending.errors:
            shortage = self._shortage(pending.body, pending.idle)
            if shortage is not None:
                pending.errors.append(shortage.to_map())
        reply: Body = {"seq": seq, "node": self._spec.node}
        if pending.errors:
            reply["errors"] = pending.errors[:ERRORS_TOLD]
            reply["failed"] = len(pending.errors)
        if pending.interrupted:
            reply["interrupted"] = pending.interrupted
        if pending.value is not None:
            reply["value"] = pending.value
        if pending.matrices:
            reply["matrices"] = pending.matrices
        if self._manager is not None:
            self._manager.send(Kind.REPLY, reply)

    # --- the end ---

    def _told_to_go(self) -> None:
        """The node is being taken away: say so before the line is cut."""
        if not self._leaving:
            self._event("node_leaving", hostname=os.uname().nodename)
        self._stop()

    async def _shutdown(self) -> None:
        self._leaving = True
        for process in self._ranks.values():
            if process.control is not None:
                process.control.send(Kind.COMMAND, {"op": "exit"})
        deadline = time.monotonic() + EXIT_GRACE_S
        while time.monotonic() < deadline and self._local.any_alive():
            await asyncio.sleep(0.01)
        self._stop()

    def _stop(self) -> None:
        self._leaving = True
        if self._over is not None:
            self._over.set()

    def clean(self) -> None:
        """Kill what still runs and remove every trace."""
        if not self._local.forked:
            self._folder.learn_segments(self._local.pids())
        self._local.kill()
        self._log()
        self._folder.remove()


def main(spec: ProxySpec, run_rank: Callable[[RankConfig], None]) -> None:
    """Be a proxy until the gang ends. Does not return."""
    status = 1
    proxy = None
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        proxy = Proxy(spec, run_rank)
        uvloop.run(proxy.serve())
        status = 0
    except SystemExit:
        status = 0
    finally:
        if proxy is not None:
            proxy.clean()
        sys.stdout.flush()
        os._exit(status)
