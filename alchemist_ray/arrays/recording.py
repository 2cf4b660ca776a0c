"""Expressions that are recorded, and computed when their values are needed.

``A * 2 + B`` gives a handle at once, of known shape and dtype. The first that asks for more of it
(its id, to name it in a command) has it computed: the calls it consists of travel as one command,
and ranks carry them out, where they can in one pass over memory (`ali/arrays/expressions.py`).

Nothing that a program can see depends on it: only what cannot fail is recorded, and whatever may
change an operand, or ask what there is on the gang, first has all recorded expressions computed.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.libraries import calling_frame
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.errors import AlchemistError

MAX_OPERANDS = 8  # of a command
MAX_STEPS = 48
MAX_NBYTES = 1 << 20  # 1 MiB of small operands in a command
MAX_USES = 2  # so often is a value computed as a part of others before it is stored


class Recording:
    """One call that is not carried out yet; its operands are handles, or calls as well.

    Attributes
    ----------
    error : AlchemistError or None
        Why it could not be computed.
    floating : dict
        The `numpy.errstate` of the operation.
    place : str
        File and line of the program.
    uses : int
        How often it was computed as a part of other values.
    value : handle or None
        Of the result, when there is one.
    view_of : handle or None
        The array of which NumPy would make the result a view.
    """

    __slots__ = (
        "__weakref__", "connection", "error", "floating", "handle", "nbytes", "operands", "place",
        "routine", "steps", "uses", "value", "values", "view_of",
    )  # fmt: skip

    def __init__(
        self, connection: GangConnection, handle: Any, routine: str, operands: dict[str, Any],
        values: dict[str, Any],
    ) -> None:  # fmt: skip
        self.connection = connection
        self.handle = weakref.ref(handle)
        self.routine, self.operands, self.values = routine, operands, values
        self.floating = np.geterr()
        self.place = _place()
        self.uses = 0
        self.value: Any = None
        self.view_of: Any = None
        self.error: AlchemistError | None = None
        inner = [one for one in operands.values() if isinstance(one, Recording)]
        self.steps: int = 1 + sum(one.steps for one in inner)
        self.nbytes: int = len(values.get("values", b"")) + sum(one.nbytes for one in inner)


class Recorder:
    """The recorded expressions of one gang.

    Parameters
    ----------
    connection : GangConnection
    call : callable
        ``call(routine, *matrices, **values)``: carries out a routine of `ali.arrays`.
    """

    def __init__(self, connection: GangConnection, call: Callable[..., Any]) -> None:
        self._connection = connection
        self._call = call
        self._lock = threading.RLock()
        self._waiting: weakref.WeakSet[Recording] = weakref.WeakSet()

    def record(
        self,
        routine: str,
        matrices: dict[str, Any],
        values: dict[str, Any],
        shape: tuple[int, ...] | None,
        dtype: np.dtype[Any],
    ) -> Any:
        """A handle of a call's result, of that dtype and shape (None: unknown); nothing is sent."""
        operands = {name: self._operand(routine, handle) for name, handle in matrices.items()}
        like: Any = next(iter(matrices.values()))
        handle = like.__class__.__new__(like.__class__)
        node = Recording(self._connection, handle, routine, operands, values)
        for name, value in (
            ("shape", shape), ("dtype", dtype), ("session", like.session), ("gang", like.gang),
            ("epoch", like.epoch), ("_recording", node),
        ):  # fmt: skip
            if value is not None:
                object.__setattr__(handle, name, value)
        with self._lock:
            self._waiting.add(node)
        return handle

    def view(self, copy: Any, A: Any) -> Any:
        """A copy of A, maybe recorded, of which NumPy would make a view."""
        if not copy.recording:
            return copy.mark_part_of(A)
        copy._recording.view_of = A
        return copy

    def original(self, handle: Any) -> Any:
        """The original of a handle that is a copy, if that copy is not made yet."""
        node = handle._recording
        if node is None or node.routine != "astype":
            return handle
        source = node.operands.get("A")  # none: another thread has just computed it
        return source if isinstance(source, MatrixRef) and source.dtype == handle.dtype else handle

    def operands(self, routine: str, handle: Any) -> dict[str, Any] | None:
        """The arguments of a handle, if it is a call of that routine and rarely asked for."""
        with self._lock:  # or another thread computes it meanwhile
            node: Recording | None = handle._recording
            if node is None or node.routine != routine or node.uses >= MAX_USES:
                return None
            node.uses += 1
            return node.operands | node.values

    def _operand(self, routine: str, handle: Any) -> Any:
        """The call that makes a matrix, or a handle of it if it is there, or should be."""
        node = handle._recording
        if node is None:
            return handle
        long = node.steps >= MAX_STEPS // 2 or node.nbytes > MAX_NBYTES // 2
        # What is not done piece by piece.
        alone = node.routine in ("reduce", "transpose") or routine in ("elements", "transpose")
        return self.value(node) if long or alone or node.uses >= MAX_USES else node

    def value(self, node: Recording) -> Any:
        """A handle of the result, computed now if it is not there. Raises `AlchemistError`."""
        with self._lock:
            if node.error is not None:
                raise node.error
            if node.value is None:
                try:
                    with np.errstate(**node.floating):
                        node.value = self._compute(node)
                except AlchemistError as error:
                    error.add_note(f"The expression is at {node.place}.")
                    raise
                if node.view_of is not None:
                    node.value.mark_part_of(node.view_of)
                node.operands, node.values, node.view_of = {}, {}, None
                self._waiting.discard(node)
                handle = node.handle()
                if handle is not None:
                    for name in ("id", "name", "shape", "layout", "epoch", "columns", "_lease"):
                        object.__setattr__(handle, name, getattr(node.value, name))
                    object.__setattr__(handle, "_recording", None)
            return node.value

    def plan(self, node: Recording) -> list[str]:
        """The steps of the command that computes a recorded expression."""
        program = _Program()
        program.place(node)

        def told(place: int) -> str:
            return f"step {place + 1}" if place >= 0 else program.operands[-1 - place].name

        found = []
        for routine, matrices, values in program.steps:
            given = [*map(told, matrices.values()), *map(str, values.get("value", ())[:1])]
            found.append(f"{values.get('op', routine)}({', '.join(given)})")
        return found

    def _compute(self, node: Recording) -> Any:
        program = _Program()
        program.place(node)
        for call in program.calls:
            call.uses += 1
        if len(program.operands) > MAX_OPERANDS:
            for one in node.operands.values():
                if isinstance(one, Recording):
                    self.value(one)
            return self._compute(node)
        matrices = dict(zip("ABCDEFGH", program.operands, strict=False))
        if len(program.steps) == 1:
            named = {name: matrices["ABCDEFGH"[-1 - i]] for name, i in program.steps[0][1].items()}
            return self._call(node.routine, **named, **node.values)
        op = next((values["op"] for *_, values in reversed(program.steps) if "op" in values), "")
        steps = json.dumps(program.steps)
        return self._call("evaluate", op, steps, program.data, **matrices)

    def flush(self) -> None:
        """Compute all expressions that have a handle; an error is raised where one is used."""
        with self._lock:
            waiting = list(self._waiting)
        for node in waiting:
            if node.handle() is not None:
                try:
                    self.value(node)
                except AlchemistError as error:
                    with self._lock:
                        node.error = error
                        self._waiting.discard(node)


class _Program:
    """Calls in the order in which they can be carried out, as `evaluate` of the ranks takes them.

    Matrices are results of earlier steps, counted from 0, or operands, from -1 down.
    """

    def __init__(self) -> None:
        self.operands: list[MatrixRef] = []
        self.steps: list[tuple[str, dict[str, int], dict[str, Any]]] = []
        self.data = b""
        self.calls: list[Recording] = []
        self._places: dict[int, int] = {}

    def place(self, one: Any) -> int:
        """The place of a handle, or of a call after all that it needs."""
        if isinstance(one, Recording) and one.value is not None:
            one = one.value
        if id(one) not in self._places:
            self._places[id(one)] = self._placed(one)
        return self._places[id(one)]

    def _placed(self, one: Any) -> int:
        if isinstance(one, MatrixRef):
            self.operands.append(one)
            return -len(self.operands)
        matrices = {name: self.place(operand) for name, operand in one.operands.items()}
        values = dict(one.values)
        if "value" in values:
            values["value"] = values["value"].real, values["value"].imag
        if "values" in values:
            start = len(self.data)
            self.data += values["values"]
            values["values"] = start, len(self.data)
        self.steps.append((one.routine, matrices, values))
        self.calls.append(one)
        return len(self.steps) - 1


def _place() -> str:
    frame = calling_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
