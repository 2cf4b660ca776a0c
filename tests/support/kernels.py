"""Jupyter kernels for tests: cells are run, interrupted, and their kernels killed."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

CELL_S = 60.0


@pytest.fixture
def plain_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An IPython shell in this process."""
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell  # noqa: PLC0415
    from traitlets.config import Config  # noqa: PLC0415

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    made = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    yield made
    made.reset(new_session=False)
    InteractiveShell.clear_instance()


class Notebook:
    """A kernel and what its cells have printed; another kernel when it has been killed."""

    def __init__(self, address: str) -> None:
        self._environment = os.environ | {"RAY_ADDRESS": address}
        self._start()

    def _start(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env=self._environment)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=CELL_S)

    def run(self, cell: str, *, interrupt_at: str | None = None) -> str:
        """Run a cell; what it has printed, or ``"killed"`` if its kernel was.

        `interrupt_at`: the printed words at which the cell is interrupted, as by *Kernel >
        Interrupt*. The result ends with the name of the exception that this raised.
        """
        printed: list[str] = []
        request, deadline = self._client.execute(cell), time.monotonic() + CELL_S
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except queue.Empty:
                if self._manager.is_alive():
                    continue
                self.close()
                self._start()
                return "killed"
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "error":
                assert interrupt_at is not None, "\n".join(content["traceback"])
                printed.append(content["ename"])
            if kind == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
                if interrupt_at and interrupt_at in "".join(printed):
                    self._manager.interrupt_kernel()
                    interrupt_at = ""
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(printed)
        raise AssertionError(f"not ended after {CELL_S} s, it has printed {printed}:\n{cell}")

    def restart(self) -> None:
        """Another kernel, as by *Kernel > Restart*."""
        self.close()
        self._start()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
