"""The methods of `AlchemistSession` for gangs that several processes use."""

from __future__ import annotations

import builtins
from typing import Self

from ray.exceptions import GetTimeoutError

from alchemist_ray.errors import SessionError
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.launchers import AUTO
from alchemist_ray.runtime import gangs
from alchemist_ray.runtime.gang_options import GangOptions
from alchemist_ray.runtime.gang_owner import GangOwner
from alchemist_ray.runtime.gangs import CallInfo, GangInfo
from alchemist_ray.runtime.ray_calls import ask_manager
from alchemist_ray.runtime.ray_cluster import join_ray


class SharedGangs(GangOwner):
    """Attaches to gangs of other sessions, lists and ends them."""

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        timeout_s: float = 60.0,
        progress: bool | None = None,
        output: bool = True,
    ) -> Self:
        """A session on a gang that another process has started, at the same time as others.

        Parameters
        ----------
        name : str
            Of a gang in the Ray cluster of this process; see `list`.
        timeout_s : float
            Time limit if the gang is being started, in seconds.
        progress, output
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
        join_ray(None, start=False)
        manager = gangs.find_manager(name)
        try:
            address: GangAddress = ask_manager(manager.attach.remote(), timeout_s)
        except GetTimeoutError:
            raise SessionError(
                f"gang {name} was not ready in {timeout_s:g} s: see AlchemistSession.list()"
            ) from None
        session = cls.__new__(cls)
        options = GangOptions.checked("own", 1, None, AUTO, timeout_s)
        session._begin(options, progress, output)
        session.id = address.session
        session._attached = True
        session._connect(address, manager)
        return session

    @classmethod
    def list(cls) -> builtins.list[GangInfo]:
        """The gangs of this Ray cluster, private ones as well: state, owner, size, use.

        Raises `SessionError` if this process is in no Ray cluster and finds none.
        """
        join_ray(None, start=False)
        return gangs.list_gangs()

    @classmethod
    def stop_gang(cls, name: str) -> None:
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
        join_ray(None, start=False)
        gangs.stop(name)

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
                "the gang is private and ends with this session: only a gang with "
                "lifetime='detached' can be left"
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
        return builtins.list(gangs.calls_of(self.connection.request({"op": "status"})))
