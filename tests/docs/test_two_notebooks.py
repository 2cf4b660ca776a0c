"""The tutorial with two notebooks runs in two Jupyter kernels, one of which is killed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import NOTEBOOK, ROOT
from tests.support.kernels import Notebook

CELL = re.compile(rf"^```python\n({NOTEBOOK.pattern}\n.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def notebooks(cluster: str) -> Iterator[dict[str, Notebook]]:
    found = {number: Notebook(cluster) for number in "12"}
    yield found
    for notebook in found.values():
        notebook.close()


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
