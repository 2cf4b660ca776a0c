"""Values that leave a gang: fetched arrays and parts, Python numbers, text."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arrays.engine import Engine
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.errors import (
    AlchemistError,
    CallTimeoutError,
    GroupFailedError,
    MatrixNotFoundError,
    SessionError,
    StaleHandleError,
)
from alchemist_ray.transfer import fetching
from mpi_workers.matrix.sizes import readable

ITERATED_NBYTES = 16 << 20  # 16 MiB: fetched at once by an iteration
EDGE = 3  # rows and columns at each end that are shown of a large matrix
TEXT_TIMEOUT_S = 2.0  # for the corners of a matrix
BUSY_S = 0.3  # longer commands are calls of which text does not wait for the end
SHOWN = 1000  # elements: larger arrays are summarized, as NumPy does


class FetchedValues(MatrixRef):
    """Fetching, and the protocols of Python that fetch. `ArrayOperators` inherits it."""

    __slots__ = ()

    def fetch(
        self,
        rows: slice | int | None = None,
        cols: slice | int | None = None,
        *,
        print_times: bool = False,
    ) -> NDArray[Any]:
        """The elements as a NumPy array, C-ordered.

        Parameters
        ----------
        rows, cols : slice or int, optional
            The part to fetch; an integer is a part of length 1. `cols` is for matrices. Only
            the range of rows and columns that spans it is moved: of ``slice(0, 100, 10)`` the
            first 91 rows. Default: all.
        print_times : bool
            Print how long each step took, per rank.

        Returns
        -------
        ndarray, with as many dimensions as the handle

        Raises
        ------
        StaleHandleError, MatrixNotFoundError
            If the gang has ended or the matrix was freed.
        GroupFailedError, TransferError
            If a rank dies during the transfer.

        Notes
        -----
        One copy on the same node; two streams from each other node.
        """
        return fetching.fetch(gang_of(self), self, rows, cols, print_times=print_times)

    def __iter__(self) -> Iterator[Any]:
        """Numbers of a vector, or parts along the first axis: they are fetched in blocks."""
        if not self.shape:
            raise TypeError("cannot iterate over an array of shape ()")
        step = max(1, ITERATED_NBYTES // max(1, self.nbytes // max(1, self.shape[0])))
        for start in range(0, self.shape[0], step):
            block = self.fetch(slice(start, start + step))
            block.flags.writeable = False  # `row -= 1` would not change this array
            yield from block

    def item(self, *index: int) -> Any:
        """One element as a Python number: the only one, or that at an index.

        As in NumPy, a single index counts the elements in C order.
        """
        if not index and math.prod(self.shape) != 1:
            raise ValueError(
                f"an array of shape {self.shape} is not a single number, and its truth value "
                "is ambiguous: use .any(), .all() or .fetch()"
            )
        if len(index) == 1 and len(self.shape) > 1:
            index = tuple(
                map(int, np.unravel_index(range(math.prod(self.shape))[index[0]], self.shape))
            )
        if len(self.shape) > 2:
            one: Any = self
            return one[index].fetch().item()
        return self.fetch(*index).item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        return self.fetch().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if self.shape or self.dtype.kind not in "iu":
            raise TypeError(f"a {self.dtype} array of shape {self.shape} is not an index")
        return int(self.item())

    def head(self, n: int = 5) -> NDArray[Any]:
        """The first rows, fetched."""
        return self.fetch(slice(0, n))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(
                f"{self.name} is on the ranks, and a fetch copies it: leave out copy=False"
            )
        fetched = self.fetch()
        return fetched if dtype is None else fetched.astype(dtype, copy=False)

    # --- text ---

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.shape else format(str(self), spec)

    def __str__(self) -> str:
        """The elements as NumPy prints them, of a large array the corners."""
        return self._numbers(np.array2string)

    def __repr__(self) -> str:
        return f"{self.described()}\n{self}"

    def _repr_html_(self) -> str:
        rows = {
            "matrix": html.escape(self.name),
            "shape": " &times; ".join(f"{length:,}" for length in self.shape) or "()",
            "dtype": str(self.dtype),
            "layout": self.layout,
            "size": readable(self.nbytes),
            "gang": f"{html.escape(self.gang)} (epoch {self.epoch})",
        }
        cells = "".join(f"<tr><th>{k}</th><td>{v}</td></tr>" for k, v in rows.items())
        return f"<table>{cells}</table><pre>{html.escape(str(self))}</pre>"

    def _numbers(self, text: Callable[..., str], dtype: Any = None) -> str:
        """The elements, seen as of a dtype, as text; why there are none if they are not here."""
        try:
            corners = self.known_elements()
            if corners is None:
                corners = self._corners()
        except (MatrixNotFoundError, StaleHandleError):
            return "(freed)"
        except CallTimeoutError:
            return f"(no answer within {TEXT_TIMEOUT_S:g} s)"
        except (GroupFailedError, SessionError):
            return "(its session has ended)"
        except AlchemistError as error:
            return f"({error})"
        if corners is None:
            return "(a call is running on the gang)"
        corners = corners if dtype is None else corners.view(dtype)
        if not self.shape:
            return str(corners[()])
        if max(self.shape) > 2 * EDGE and math.prod(self.shape) > SHOWN:
            return text(corners, threshold=0, edgeitems=EDGE)
        return text(corners)

    def _corners(self) -> NDArray[Any] | None:
        """Everything of a small array; else its corners and one element of each axis between.

        None if a call is running, which would have to be waited for.
        """
        connection = gang_of(self)
        connection.check(self)
        patience = time.monotonic() + BUSY_S
        while connection.request({"op": "ping"})["busy"]:
            if time.monotonic() > patience:
                return None
            time.sleep(BUSY_S / 10)
        size = math.prod(self.shape)
        edges = [
            range(length) if size <= SHOWN or length <= 2 * EDGE
            else [*range(EDGE + 1), *range(length - EDGE, length)]
            for length in self.shape
        ]  # fmt: skip
        lists = [np.asarray(edge, np.int64) for edge in edges]
        found = connection.part(Engine).corners(self, lists, TEXT_TIMEOUT_S)
        elements: NDArray[Any] = found.fetch()
        return elements
