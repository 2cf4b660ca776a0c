"""The libraries that a file needs are those that the loader takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ali.loader import MAGIC, chains
from tests.support.build import needs_compiler


def build(folder: Path, name: str, *flags: str) -> Path:
    (folder / "x.c").write_text("int nothing;\n")
    command = ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", "x.c", f"-Wl,-soname,{name}"]
    subprocess.run([*command, "-o", name, *flags], cwd=folder, check=True)
    return folder / name


@needs_compiler
@pytest.mark.parametrize("way", ["rpath", "runpath", "variable", "nowhere"])
def test_it_finds_what_the_loader_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    flags = {
        "rpath": "-Wl,-rpath,$ORIGIN/inner,--disable-new-dtags",
        "runpath": "-Wl,-rpath,${ORIGIN}/inner,--enable-new-dtags",
    }
    build(inner, "liblast.so.1")
    build(inner, "libmiddle.so.2", "-L.", "-l:liblast.so.1")
    own = [flags[way]] if way in flags else []
    first = build(tmp_path, "libfirst.so", "-Linner", "-l:libmiddle.so.2", *own)
    if way == "variable":
        monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{inner}")
    found = [chain for chain in chains(first) if not chain[-1].startswith(("libc.", "ld-"))]
    assert found[0] == ("libmiddle.so.2",)
    assert (("libmiddle.so.2", "liblast.so.1") in found) == (way != "nowhere")
    loaded = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(first)!r})"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # RUNPATH, unlike RPATH, is not searched for the libraries of a library.
    assert (loaded.returncode == 0) == (way in ("rpath", "variable")), loaded.stderr


def test_it_follows_the_system_libraries_of_this_python() -> None:
    names = {chain[-1] for chain in chains(Path(sys.executable))}
    assert "libc.so.6" in names
    assert "libm.so.6" in names  # only libpython needs it


@pytest.mark.parametrize("content", [b"", b"text", MAGIC, MAGIC + b"\xff" * 200])
def test_a_file_that_is_no_library_needs_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.so").write_bytes(content)
    assert list(chains(tmp_path / "x.so")) == []
