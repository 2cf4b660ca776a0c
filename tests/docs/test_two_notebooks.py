"""The tutorial with two notebooks runs in two Jupyter kernels, one of which is killed."""

from __future__ import annotations

import os
import queue
import re
import time
from collections.abc import Iterator

import pytest
from jupyter_client.manager import KernelManager

from tests.docs.pages import NOTEBOOK, ROOT

CELL = re.compile(rf"^```python\n({NOTEBOOK.pattern}\n.*?)^```", re.MULTILINE | re.DOTALL)
CELL_S = 60.0


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

    def run(self, cell: str) -> str:
        """Run a cell; what it has printed, or ``"killed"`` if its kernel was."""
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
            assert kind != "error", "\n".join(content["traceback"])
            if kind == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(printed)
        raise AssertionError(f"not ended after {CELL_S} s, it has printed {printed}:\n{cell}")

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def notebooks(cluster: str) -> Iterator[dict[str, Notebook]]:
    found = {number: Notebook(cluster) for number in "12"}
    yield found
    for notebook in found.values():
        notebook.close()


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_killed_kernel_finds_its_gang_again(notebooks: dict[str, Notebook]) -> None:
    text = (ROOT / "docs/two-notebooks.md").read_text()
    cells = [(match[2], match[1]) for match in CELL.finditer(text)]
    said = [(number, notebooks[number].run(cell)) for number, cell in cells]
    assert [number for number, _ in said] == ["1", "2", "1", "2", "1", "1", "2"]
    singular, second, _, changed, killed, back, _ = (words for _, words in said)
    assert re.fullmatch(r"\[\d+\.\d?( +\d+\.\d?){2} *\]\n", singular)
    assert re.search(r"^\['linalg'\] \d+\.\d\nweather ready 2 processes, 5 matrices\n", second)
    assert changed == "0.0\n"
    assert killed == "killed"
    assert (took := re.fullmatch(r"\(2000, 3\) \(2000, 50\) after (\d\.\d) s\n", back)) is not None
    assert float(took[1]) < 10.0  # the time is tested in tests/faults/named
