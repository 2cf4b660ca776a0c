"""The methods of `AlchemistSession` for gangs that several processes use."""

from __future__ import annotations

import builtins
from typing import Any, Self

from alchemist_ray.arguments import positive_int
from alchemist_ray.errors import SessionError
from alchemist_ray.gang import registry
from alchemist_ray.gang.info import CallInfo, GangInfo, WorkerInfo, calls_of
from alchemist_ray.gang.narration import narrated
from alchemist_ray.gang.options import AttachOptions, with_options
from alchemist_ray.gang.owner import GangOwner
from alchemist_ray.plural import counted


class SharedGangs(GangOwner):
    """Resizes gangs, attaches to those of other sessions, lists and ends them."""

    def resize(self, num_workers: int) -> builtins.list[WorkerInfo]:
        """Move the gang to another number of ranks, with its matrices and libraries.

        Handles stay valid. Commands of all processes run until the new ranks are ready, and wait
        while the matrices are moved.

        Parameters
        ----------
        num_workers : int
            More or fewer than now.

        Returns
        -------
        list of WorkerInfo
            One per rank.

        Raises
        ------
        ResourceError
            If the cluster does not have the CPUs, or a node not the memory for the matrices of
            both the old and the new ranks.
        LaunchError, TransferError
            If the new ranks do not start in time, or a node is lost.
        LibraryLoadError
            If a library cannot be loaded on the new ranks.
        GroupError
            If ranks are lost.

        Notes
        -----
        After an error, or Ctrl-C, the gang goes on as it was. States of libraries without
        `save_state` and `load_state` start empty (``docs/resize.md``). Several processes that
        resize a gang do it one after the other.
        """
        positive_int("num_workers", num_workers)
        connection = self.connection
        with narrated(connection, f"Resize to {counted(int(num_workers), 'worker')}"):
            self._gangs.resize(connection, int(num_workers))
        return self.list_workers()

    @classmethod
    @with_options(AttachOptions, "AlchemistSession.attach")
    def attach(cls, options: AttachOptions) -> Self:
        """A session on a gang that another process has started, at the same time as others.

        Parameters
        ----------
        name : str
            Of a gang in the Ray cluster of this process; see `list`.
        timeout_s : float
            Time limit if the gang is being started, in seconds.
        address, token, progress, output, verbose, buffer_bytes
            As for `AlchemistSession`.

        Returns
        -------
        AlchemistSession
            Its `close` or `stop`, and the end of ``with``, detach it. The gang's matrices are
            found by `matrix` and `list_matrices`, its libraries by `library`, its calls by
            `list_calls`.

        Raises
        ------
        SessionError
            If there is no such gang, with the names of those that there are; if it is being
            ended; if it runs another version of this package or of Python.
        GroupFailedError
            If it has failed, with the cause.

        Notes
        -----
        The gang runs the commands of all processes in turn. A matrix stays while any process has
        a handle of it. A process that loses its connection to a detached gang keeps its matrices
        for 60 s, and resumes the connection with its next command.
        """
        gangs, connection = registry.access(options.address, options.token).attach(options)
        session = cls.__new__(cls)
        session._begin(options)
        session._attach_to(gangs, connection)
        return session

    @classmethod
    def list(
        cls, *, address: str | None = None, token: str | None = None
    ) -> builtins.list[GangInfo]:
        """The gangs of this Ray cluster, private ones as well: state, owner, size, use.

        Raises `SessionError` if this process is in no Ray cluster and finds none.
        """
        found: builtins.list[GangInfo] = registry.access(address, token).list_gangs(
            address=address, token=token
        )
        return found

    @classmethod
    def stop_gang(cls, name: str, *, address: str | None = None, token: str | None = None) -> None:
        """End a gang, for all its attached processes. Its matrices are freed.

        Raises
        ------
        SessionError
            If there is no such gang, with the names of those that there are.

        Notes
        -----
        Returns when its processes have ended and its CPUs are free. Processes that wait for a
        call on it get a `SessionError`.
        """
        wanted = AttachOptions(name, address=address, token=token).name
        registry.access(address, token).stop_gang(wanted, address=address, token=token)

    def serve(self, **options: Any) -> Any:
        """Start a gateway for clients without Ray in this session's cluster, or find it.

        Parameters
        ----------
        **options
            ``host``, ``port``, ``tls``, ``certfile``, ``keyfile``, ``tokens``, ``audit``: see
            `alchemist_ray.gateway.server.actor.serve`.

        Returns
        -------
        GatewayInfo
            Its `address` is for ``AlchemistSession(address=...)``; `stop` ends it. It stays when
            this session is closed.

        Raises
        ------
        SessionError
            If it cannot listen, or this session uses a gateway itself.
        """
        self._check_open()
        return self._gangs.serve(**options)

    def detach(self) -> None:
        """Leave the gang, which goes on; the session is closed.

        Raises
        ------
        SessionError
            If the gang is private: it ends with its session.
        """
        self._check_open()
        if not self._detaches:
            raise SessionError(
                "this session's gang is private and ends with it: detach() is for gangs with "
                "lifetime='detached'"
            )
        self.close()

    def cancel(self, *, everyone: bool = False) -> int:
        """Cancel the calls that other threads of this process wait for; their number.

        Parameters
        ----------
        everyone : bool
            Cancel all calls of the gang, of other processes as well, and ``.remote`` calls.

        Notes
        -----
        Who waits for such a call gets a `CancelledError`. The gang and its matrices stay.
        """
        reply = self.connection.request({"op": "cancel_calls", "all": everyone})
        return int(reply["cancelled"])

    def list_calls(self) -> builtins.list[CallInfo]:
        """The call that the gang runs, and those that wait, of all attached processes."""
        return builtins.list(calls_of(self.connection.request({"op": "status"})))
