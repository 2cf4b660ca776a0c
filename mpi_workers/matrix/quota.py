"""The quota of bytes of a gang's user: the dispatcher and the ranks check it alike."""

from __future__ import annotations

from mpi_workers.failures import Failure
from mpi_workers.matrix.sizes import readable


def check_room(nbytes: int, room: int | None) -> None:
    """Refuse `nbytes` of matrices where `room` is left; None: no limit.

    Raises
    ------
    Failure
        ResourceError.
    """
    if room is not None and nbytes > max(0, room):
        raise Failure(
            "ResourceError",
            f"{readable(nbytes)} more are asked for; the quota of this gang's user leaves "
            f"{readable(max(0, room))}: free handles, or end another gang",
        )
