"""The proxy: one process per gang and node, between the GroupManager and the ranks.

It starts the node's ranks (forked from a warm interpreter, or by a site's launcher), speaks PMI
with them, relays commands and combined replies, and notices when a rank ends. When its connection
to the GroupManager breaks, it kills the ranks and removes the gang's files.

When a rank has ended, the GroupManager has all ranks of the gang renewed:

1. `clear`: every proxy ends its ranks; the data endpoint, which has the matrices, goes on.
2. `start`, when all have done so: every proxy starts ranks.
3. `adopt`: these get the matrices from the data endpoint.

Its main thread starts the ranks and does not end, so that the kernel kills them when it dies
(PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import uvloop

from mpi_workers.data.keeping import retain
from mpi_workers.deadlines import BLAME_S, EXIT_GRACE_S
from mpi_workers.failures import Failure
from mpi_workers.node import processes
from mpi_workers.node.cleanup import GangFolder, learn_segments, note_segments
from mpi_workers.node.command_relay import CommandRelay
from mpi_workers.node.processes import (
    LocalRanks,
    RankProcess,
    WatchedProcess,
    adopt_orphans,
    descendants,
)
from mpi_workers.node.rank_output import Source
from mpi_workers.node.specs import GangPlan, RankConfig
from mpi_workers.node.stacks import of_crash
from mpi_workers.protocol.proxy_messages import PROXY_COMMANDS, STDERR
from mpi_workers.sigterm import outlive_sigterm
from mpi_workers.wire import sockets
from mpi_workers.wire.asynchronous import FrameProtocol, listen, open_connection
from mpi_workers.wire.frames import Body, Frame, Kind, WireError
from mpi_workers.wire.pmi import PmiNode, process_mapping, segment_names

LEAVE_GRACE_S = 20.0  # time limit for a gang to leave a node that is taken away (pods have 30 s)
HELLO_FIELDS = ("rank", "size", "pid", "hostname", "mpi", "gpus")
READ_LIMIT_S = 1.0  # for the GroupManager to read the last report
OUTPUT_S = 0.01  # between batches of lines that ranks print
OUTPUT_BACKLOG = 1 << 20  # 1 MiB: more is not sent before the GroupManager has read it


class Proxy:
    """One node's part of a gang."""

    def __init__(self, plan: GangPlan, node: int, run_rank: Callable[[RankConfig], None]) -> None:
        adopt_orphans()
        self._plan = plan
        self._node = node
        self._folder = GangFolder(plan.gang, plan.kvs_name, node)
        self._local = LocalRanks(plan, node)
        self._ranks = self._local.by_rank
        self._relay = CommandRelay(node, self._ranks, self._folder.word, self)
        self._manager: FrameProtocol | None = None
        self._pmi: PmiNode
        self._pmi_input: dict[int, bytearray]
        self._lost = False  # a rank has ended, and that was reported
        self._blame: asyncio.TimerHandle | None = None
        self._leaving = False
        self._output_timer: asyncio.TimerHandle | None = None
        self._shutting_down: asyncio.Future[None] | None = None
        self._over = asyncio.Event()
        crowded = processes.crowded(len(self._ranks) * plan.options.threads)
        self._listener, control = sockets.listen_unix(self._folder.socket("control"))
        host = plan.nodes[node].ip
        data = [sockets.listen_unix(self._folder.socket("data")), sockets.listen_tcp(host)]
        self._data_addresses = [address for _, address in data]
        self._local.start_endpoint([sock for sock, _ in data])
        self._config = RankConfig(
            token=plan.token,
            directory=str(self._folder.path),
            control=control,
            data=self._data_addresses[0],
            size=plan.size,
            host=host,
            crowded=crowded,
            keep_bytes=plan.keep_bytes // max(1, len(self._ranks)),
            options=plan.options,
            advice=plan.start.advice if plan.start is not None else "",
            one_node=len(plan.nodes) == 1,
            first=min(self._ranks),
            ranks=len(self._ranks),
            devices=plan.nodes[self._node].devices,
        )
        processes.set_waits(crowded)
        self._run_rank = run_rank
        self._start_ranks(plan.kvs_name)

    def _start_ranks(self, kvs_name: str) -> None:
        self._pmi = PmiNode(
            kvs_name,
            self._plan.size,
            list(self._ranks),
            process_mapping(self._plan.counts),
            send=self._to_pmi,
            barrier=lambda puts: self.send_event("pmi_barrier", puts=puts),
            abort=lambda rank, code: self._rank_ended(rank, f"called MPI_Abort({code})"),
            say=self._say,
        )
        self._pmi_input = {rank: bytearray() for rank in self._ranks}
        self._local.start(self._config, self._folder.path, self._run_rank)

    # --- the loop ---

    async def serve(self) -> None:
        """Serve until the gang ends."""
        loop = asyncio.get_running_loop()
        handlers = self._rank_hello, self._from_rank, self._rank_lost
        listen([self._listener], self._plan.token, *handlers, expected=len(self._ranks))
        await self._connect_to_manager()
        if not outlive_sigterm():
            loop.add_signal_handler(signal.SIGTERM, self._node_leaving)
        self._watch(self._local.endpoint)
        self._attend()
        # uvloop reserves its own handler of SIGCHLD for its own subprocesses.
        signal.signal(
            signal.SIGCHLD, lambda *_: None if loop.is_closed() else loop.call_soon(self._reap)
        )
        self._reap()
        await self._over.wait()

    def _attend(self) -> None:
        """Listen to ranks that have been started."""
        loop = asyncio.get_running_loop()
        for source, pipe in self._local.output.pipes.items():
            os.set_blocking(pipe, False)
            loop.add_reader(pipe, self._read_output, source)
        for rank, sock in self._local.pmi.items():
            sock.setblocking(False)
            loop.add_reader(sock, self._from_pmi, rank)
        for process in self._local.children:
            if process is not self._local.endpoint:
                self._watch(process)

    def _on_clear(self, matrices: Sequence[int]) -> None:
        """End all ranks of this node, with their descendants, and what is about them alone.

        The memory of these matrices stays.
        """
        loop = asyncio.get_running_loop()
        self._lost = True
        if self._blame is not None:
            self._blame.cancel()
        for pipe in self._local.output.pipes.values():
            loop.remove_reader(pipe)
        for sock in self._local.pmi.values():
            loop.remove_reader(sock)
        for process in (*self._ranks.values(), self._local.starter):
            if process.pidfd is not None:
                loop.remove_reader(process.pidfd)
        if not self._local.forked:
            learn_segments(self._folder.path, self._local.pids())
        self._local.end()
        self._send_lines(finished=True)
        self._relay.clear()
        self._folder.clear()
        retain(self._data_addresses[0], self._plan.token, matrices)
        self.send_event("cleared")

    def _on_start(self, number: int, kvs_name: str) -> None:
        """Start ranks, after `clear`; the number of such starts so far."""
        note_segments(self._folder.path, segment_names(kvs_name, self._node))
        self._config = replace(self._config, renewal=number)
        self._lost = False
        try:
            self._start_ranks(kvs_name)
        except OSError as error:  # no memory, or no process more
            self._rank_ended(next(iter(self._ranks)), f"could not be started: {error.strerror}")
        self._attend()

    async def _connect_to_manager(self) -> None:
        def on_frame(protocol: FrameProtocol, frame: Frame) -> None:
            if frame.kind == Kind.COMMAND and not self._leaving:
                self._command(frame)
            elif frame.kind == Kind.REFUSED:
                self._stop()

        fields = {"role": "proxy", "node": self._node}
        try:
            address = sockets.reachable_addresses(self._plan.manager)[0]
            self._manager = await open_connection(
                address, self._plan.token, fields, on_frame, lambda _: self._stop()
            )
        except (OSError, IndexError, WireError, Failure) as error:
            raise Failure(
                "LaunchError",
                f"it cannot reach the GroupManager at {', '.join(self._plan.manager)}: {error!r}. "
                "Check that this node can connect to that address",
            ) from error

    def send_event(self, op: str, **fields: Any) -> None:
        if self._manager is not None:
            self._manager.send(Kind.EVENT, {"op": op, **fields})

    def send_reply(self, body: Body) -> None:
        if self._manager is None:
            return
        try:
            self._manager.send(Kind.REPLY, body)
        except Failure as failure:  # it fitted into the rank's frame, and not into this larger one
            about = {"seq": body["seq"], "node": self._node}
            self._manager.send(Kind.REPLY, {**about, "errors": [failure.to_map()], "failed": 1})

    # --- PMI ---

    def _to_pmi(self, rank: int, line: str) -> None:
        with contextlib.suppress(OSError):  # the rank has ended: its pidfd reports it
            self._local.pmi[rank].send((line + "\n").encode())

    def _say(self, rank: int, text: str) -> None:
        self._local.output.lines.add(rank, STDERR, f"{text}\n".encode())
        self._send_lines()

    def _from_pmi(self, rank: int) -> None:
        try:
            data = self._local.pmi[rank].recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._local.pmi[rank])
            return
        buffer = self._pmi_input[rank]
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            line = buffer[:end].decode(errors="replace")
            del buffer[: end + 1]
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
                f"{list(self._ranks)}: the launcher placed ranks on the wrong nodes",
            )
        process.hello = {key: body[key] for key in HELLO_FIELDS}
        if not self._local.forked:
            process.pid = _peer_pid(protocol) or int(body["pid"])
            self._watch(process)
            # /proc does not show those of another namespace.
            note_segments(self._folder.path, body["segments"])
        process.control = protocol
        protocol.peer = process
        if all(other.control is not None for other in self._ranks.values()):
            if not self._local.forked:
                learn_segments(self._folder.path, self._local.pids())
            self._folder.unlink_segments()  # all have attached: the names are not needed
            ranks = [process.hello for process in self._ranks.values()]
            self.send_event("ready", ranks=ranks, addresses=self._data_addresses)
        return {}

    def _watch(self, process: WatchedProcess) -> None:
        """Notice a process's end, also if children of it still hold its sockets."""
        if (pidfd := process.open_pidfd()) is not None:
            asyncio.get_running_loop().add_reader(pidfd, self._process_ended, process)

    def _process_ended(self, process: WatchedProcess) -> None:
        loop = asyncio.get_running_loop()
        if process.pidfd is not None:
            loop.remove_reader(process.pidfd)
        if isinstance(process, RankProcess) and process.rank in self._local.pmi:
            self._from_pmi(process.rank)  # it may have announced an MPI_Abort
        cause = self._local.end_of(process)
        if cause is None or self._leaving:
            return
        if process is not self._local.endpoint and self._lost:
            return
        if process is self._local.endpoint:
            # No data can reach the ranks any more: the gang ends, as with a lost rank.
            host = os.uname().nodename
            self._report_last("endpoint_ended", hostname=host, cause=cause, pid=process.pid)
        elif isinstance(process, RankProcess):
            self._rank_ended(process.rank, cause)
        else:  # a launcher ends after its ranks: their own events say more
            loop.call_later(BLAME_S, self._rank_ended, next(iter(self._ranks)), cause)

    def _reap(self) -> None:
        for process in self._local.ended_children():
            self._process_ended(process)

    def _rank_lost(self, protocol: FrameProtocol) -> None:
        process = protocol.peer
        if not self._local.forked and process in self._ranks.values():
            self._rank_ended(process.rank, "ended")

    def _rank_ended(self, rank: int, cause: str, pid: int | None = None) -> None:
        """Report the end of a rank; if another one has ended it by MPI_Abort, that one's end."""
        if self._leaving or self._lost:
            return
        self._lost = True  # others end with it
        self._local.output.read_all()
        aborted = self._local.output.aborted()
        if aborted is not None and aborted[0] in self._ranks:
            rank, cause = aborted
            pid = None
        elif self._plan.start is not None and self._plan.start.across_nodes and pid is None:
            tail = self._local.output.tail(rank)
            loop = asyncio.get_running_loop()
            self._blame = loop.call_later(BLAME_S, self._report_end, rank, cause, pid, tail)
            return
        self._report_end(rank, cause, pid, self._local.output.tail(rank))

    def _report_end(self, rank: int, cause: str, pid: int | None, tail: str) -> None:
        self._send_lines(finished=True)
        self.send_event(
            "rank_ended",
            hostname=os.uname().nodename,
            rank=rank,
            cause=cause,
            pid=pid or self._ranks[rank].pid or 0,
            tail=tail,
            frames=of_crash(str(self._folder.path), rank),
        )

    def _report_last(self, op: str, **fields: Any) -> None:
        """Report, and end when the GroupManager, which has then read it, closes the connection.

        If we closed it first, its next command would fail, and it would not read the report.
        """
        self._leaving = True
        self._send_lines(finished=True)
        self.send_event(op, **fields)
        asyncio.get_running_loop().call_later(READ_LIMIT_S, self._stop)

    # --- output ---

    def _read_output(self, source: Source) -> None:
        loop = asyncio.get_running_loop()
        output = self._local.output
        if not output.read(source):
            loop.remove_reader(output.pipes[source])
        if self._output_timer is None and output.lines:
            self._output_timer = loop.call_later(OUTPUT_S, self._send_lines)

    def send_output(self, rank: int | None = None) -> None:
        self._local.output.read_all(rank)
        self._send_lines(finished=True)

    def tail_of_call(self, rank: int) -> str:
        return self._local.output.tail_of_call(rank)

    def _send_lines(self, *, finished: bool = False) -> None:
        """Send lines to the caller of the call under way; between calls, keep them for the next."""
        if self._output_timer is not None:
            self._output_timer.cancel()
            self._output_timer = None
        output = self._local.output
        transport = self._manager.transport if self._manager is not None else None
        behind = transport is not None and transport.get_write_buffer_size() > OUTPUT_BACKLOG
        if behind and not finished:
            loop = asyncio.get_running_loop()
            self._output_timer = loop.call_later(OUTPUT_S, self._send_lines)
        elif (newest := self._relay.newest) is None:
            output.hold()
        elif lines := output.take():
            self.send_event("output", seq=newest, lines=lines)

    def _log_lines(self) -> None:
        for rank, _, text in self._local.output.take():
            print(f"[rank {rank}] {text}" if rank >= 0 else text, flush=True)

    # --- commands ---

    def _command(self, frame: Frame) -> None:
        body = frame.body
        if body["op"] in PROXY_COMMANDS:
            getattr(self, f"_on_{body.pop('op')}")(**body)
            return
        if self._relay.newest is None:
            self._local.output.begin_call()
        self._relay.relay(body, frame.encoded)
        self._send_lines()  # those that were printed since the last call

    def _on_pmi_release(self, puts: dict[str, str]) -> None:
        self._pmi.release(puts)

    def _on_interrupt(self, seq: int, *, signal: bool) -> None:
        self._relay.interrupt(seq, with_signal=signal)

    def _on_report_running(self, seq: int) -> None:
        self._relay.report_running(seq)

    def _on_report_waits(self, question: int) -> None:
        self._relay.report_waits(question)

    def _on_shutdown(self) -> None:
        self._shutting_down = asyncio.ensure_future(self._shutdown())

    def _from_rank(self, protocol: FrameProtocol, frame: Frame) -> None:
        self._relay.receive(protocol.peer.rank, frame)

    # --- the end ---

    def _node_leaving(self) -> None:
        """The node is being taken away: report it; a gang that cannot move disconnects at once."""
        if not self._leaving:
            self.send_event("node_leaving", hostname=os.uname().nodename)
        asyncio.get_running_loop().call_later(LEAVE_GRACE_S, self._stop)

    async def _shutdown(self) -> None:
        self._leaving = True
        self._relay.close()
        for process in self._ranks.values():
            if process.control is not None:
                process.control.send(Kind.COMMAND, {"op": "exit"})
        deadline = time.monotonic() + EXIT_GRACE_S
        while time.monotonic() < deadline and self._local.any_alive():
            await asyncio.sleep(0.01)
        self._stop()

    def _stop(self) -> None:
        self._leaving = True
        self._relay.close()
        self._over.set()

    def clean(self) -> None:
        """Kill the remaining processes and remove the gang's files."""
        # Programs that ranks have started have segments of their own.
        pids = self._local.pids() | descendants([os.getpid()])
        learn_segments(self._folder.path, pids)
        self._local.kill()
        self._log_lines()
        self._folder.remove()


def _peer_pid(protocol: FrameProtocol) -> int:
    """The pid of a rank in our own pid namespace, as the kernel gives it."""
    assert protocol.transport is not None
    pid, _ = sockets.peer(protocol.transport.get_extra_info("socket"))
    return pid


def main(plan: GangPlan, node: int, run_rank: Callable[[RankConfig], None]) -> None:
    """Run a proxy until the gang ends. Does not return; raises what it failed with."""
    proxy = None
    try:
        with contextlib.suppress(SystemExit):
            if not outlive_sigterm():
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            proxy = Proxy(plan, node, run_rank)
            uvloop.run(proxy.serve())
    finally:
        if proxy is not None:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            proxy.clean()
        sys.stdout.flush()
    os._exit(0)
