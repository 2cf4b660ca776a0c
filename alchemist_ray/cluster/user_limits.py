"""Limits of a user: how many gangs, ranks and bytes at a time. Gateways and Drivers check them.

Inside a cluster they are advice: Ray knows no users, and believes the name that a process gives.
"""

from __future__ import annotations

import os

from alchemist_ray.errors import ResourceError

# In the environment of the Driver's node, that is of `ray start --head`.
GANGS_VARIABLE = "ALCHEMIST_USER_GANGS"
RANKS_VARIABLE = "ALCHEMIST_USER_RANKS"
BYTES_VARIABLE = "ALCHEMIST_USER_BYTES"


def check_limits(
    user: str, gangs: int, ranks: int, most_gangs: int | None, most_ranks: int | None, whose: str
) -> None:
    """Raise `ResourceError` if a user would have more than the limits; `whose`: who sets them."""
    for what, wanted, most in (("gangs", gangs, most_gangs), ("ranks", ranks, most_ranks)):
        if most is not None and wanted > most:
            raise ResourceError(
                f"{user} would have {wanted} {what}, more than the quota of {whose}, "
                f"{most}: end a gang first (yield_workers, stop_gang)"
            )


class ClusterLimits:
    """The limits of a cluster, and what each user's gangs have reserved."""

    def __init__(self) -> None:
        self._reserved: dict[str, tuple[str, str, int]] = {}  # by reservation: user, gang, ranks
        self._nbytes: dict[str, int] = {}  # by gang

    def add(self, user: str, gang: str, reservation: str, ranks: int, *, instead: bool) -> None:
        """Note a reservation; `instead`: of another one, which is given back next.

        Raises
        ------
        ResourceError
            If it exceeds the limits; it is not noted then.
        """
        mine = [(its, count) for who, its, count in self._reserved.values() if who == user]
        if not instead:
            gangs = {gang, *(its for its, _ in mine)}
            total = ranks + sum(count for _, count in mine)
            most = _limit(GANGS_VARIABLE), _limit(RANKS_VARIABLE)
            check_limits(user, len(gangs), total, *most, "this cluster")
        self._reserved[reservation] = user, gang, ranks

    def remove(self, reservation: str) -> None:
        """A reservation has been given back."""
        self._reserved.pop(reservation, None)
        self._nbytes = {gang: self._nbytes.get(gang, 0) for _, gang, _ in self._reserved.values()}

    def share(self, user: str, gang: str, nbytes: int) -> int | None:
        """Note the bytes of a gang's matrices. How many it may have; None: no limit."""
        self._nbytes[gang] = nbytes
        others = {its for who, its, _ in self._reserved.values() if who == user} - {gang}
        most = _limit(BYTES_VARIABLE)
        return None if most is None else most - sum(self._nbytes.get(its, 0) for its in others)


def _limit(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise ResourceError(f"{variable}={text!r}: it must be a whole number")
    return int(text) if text else None
