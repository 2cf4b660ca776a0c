"""Finds a library by name: shipped, given by path, or installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from ali.mpi_family import refuse_second_mpi
from ali.native import NativeLibrary
from ali.python_library import PythonLibrary
from mpi_workers.failures import Failure
from mpi_workers.protocol.libraries import ENTRY_POINTS, SHIPPED

FOUND_BY_PATH = ("scalapack", "elemental")  # `path` is the path of their shared object


def load(name: str, path: str | None = None) -> PythonLibrary | NativeLibrary:
    """Load a library on this rank.

    Parameters
    ----------
    name : str
        A shipped library, an entry point in the group ``alchemist.libraries`` (a module, or a
        function that returns the path of a shared object), or an importable module. With
        `path`, any name.
    path : str, optional
        A ``.py`` file (executed at every load) or a shared object that exports the C ABI; this
        node must be able to read it. For ``"scalapack"`` and ``"elemental"``, their own shared
        object.

    Raises
    ------
    Failure
        LibraryNotFoundError, or LibraryLoadError with the traceback.
    """
    try:
        if path is None or name in FOUND_BY_PATH:
            found = _by_name(name)
            if isinstance(found, Path):
                return NativeLibrary(name, _existing(name, found))
            shipped = found.__name__.partition(".")[0] == "ali"
            return _checked(PythonLibrary(name, found, path, shipped=shipped), name, found)
        if Path(path).suffix == ".py":
            module = _by_path(name, _existing(name, path))
            return _checked(PythonLibrary(name, module), name, module)
        if ".so" in Path(path).suffixes:
            return NativeLibrary(name, _existing(name, path))
        raise Failure(
            "LibraryLoadError",
            f"library {name!r}: {path} is neither a Python file (.py) nor a shared object (.so)",
        )
    except Failure:
        raise
    except Exception as error:
        raise Failure(
            "LibraryLoadError",
            f"library {name!r} did not load: {type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
        ) from error


def _checked(library: PythonLibrary, name: str, module: ModuleType) -> PythonLibrary:
    """A library whose modules have loaded no other MPI; ours check what they load."""
    if not module.__name__.startswith("ali."):
        try:
            refuse_second_mpi(name, Path(module.__file__ or module.__name__))
        except Failure:
            library.close()
            raise
    return library


def _existing(name: str, path: str | Path) -> Path:
    if not Path(path).is_file():
        raise Failure(
            "LibraryNotFoundError",
            f"library {name!r}: there is no file {path} on node {os.uname().nodename}; put it on a "
            "path that every node of the gang can read",
        )
    return Path(path)


def _by_path(name: str, path: Path) -> ModuleType:
    module_name = f"alchemist_library_{name}"
    module = ModuleType(module_name)
    module.__file__ = str(path)
    # Without an importer: its cache misses a change within the same second.
    code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
    before = sys.modules.get(module_name)
    sys.modules[module_name] = module  # dataclasses look themselves up there
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[module_name]
        if before is not None:
            sys.modules[module_name] = before
        raise
    return module


def _by_name(name: str) -> ModuleType | Path:
    """A library's module, or the path of its shared object."""
    if name in SHIPPED:
        return importlib.import_module(SHIPPED[name])
    declared = {entry.value: entry for entry in entry_points(group=ENTRY_POINTS, name=name)}
    if len(declared) > 1:
        packages = sorted(str(e.dist.name if e.dist else e.value) for e in declared.values())
        raise Failure(
            "LibraryLoadError",
            f"library {name!r} is declared by several installed packages: {', '.join(packages)}. "
            f"Uninstall all but one, or give a path: load_library({name!r}, path)",
        )
    for entry in declared.values():
        plug = entry.load()
        if isinstance(plug, ModuleType):
            return plug
        if callable(plug):  # returns the path of the shared object on this node, and may build it
            return Path(plug())
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if found:
        return importlib.import_module(name)
    installed = sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)})
    raise Failure(
        "LibraryNotFoundError",
        f"there is no library {name!r}. Shipped: {', '.join(SHIPPED)}. Installed: "
        f"{', '.join(installed) or 'none'}. A file of your own: load_library({name!r}, "
        '"path/to/it.py") or "path/to/libit.so", in an environment lib_path',
    )
