"""The tutorial with two notebooks runs in two Jupyter kernels, one of which is killed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

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

        def show(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed.append(message["content"]["text"])

        try:
            reply = self._client.execute_interactive(cell, timeout=CELL_S, output_hook=show)
        except RuntimeError:  # "Kernel died"
            assert not self._manager.is_alive()
            self.close()
            self._start()
            return "killed"
        content = reply["content"]
        assert content["status"] == "ok", "\n".join(content["traceback"])
        return "".join(printed)

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
    assert re.fullmatch(r"\[158\.\d +\d+\.\d +\d+\.\d\]\n", singular)
    assert re.search(r"^\['linalg'\] \d+\.\d\nweather ready 2 processes, 5 matrices\n", second)
    assert changed == "0.0\n"
    assert killed == "killed"
    assert (took := re.fullmatch(r"\(2000, 3\) \(2000, 50\) after (\d\.\d) s\n", back)) is not None
    assert float(took[1]) < 2.0
