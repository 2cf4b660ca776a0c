"""Counts the code of the project: lines without docstrings, comments and blanks.

Run as ``python -m tests.support.code_size`` for tables by folder and by capability;
``--files`` lists the files.
"""

import argparse
import ast
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".c", ".h", ".hpp", ".cpp", ".java", ".scala", ".f90"}
APART = ("tests", "benchmarks")
# The longest name that a path begins with decides.
CAPABILITIES = {
    "gangs and launchers": (
        "alchemist_ray", "alchemist_ray/attached", "alchemist_ray/cluster",
        "alchemist_ray/functions", "alchemist_ray/launchers", "alchemist_ray/runtime",
        "alchemist_ray/session", "mpi_workers",
    ),
    "transfer": (
        "alchemist_ray/transfer", "mpi_workers/columns", "mpi_workers/data", "mpi_workers/wire",
    ),
    "layouts and matrices": ("mpi_workers/matrix",),
    "arrays": ("alchemist_ray/arrays", "ali/arrays"),
    "libraries": ("ali",),
    "clients": ("alchemist_ray/clients", "alchemist_ray/gateway", "alchemist_ray/ray_access"),
    "sparse and PETSc": ("alchemist_ray/sparse", "ali/petsc", "ali/sparse"),
    "environments": ("envs", "ali/simulator"),
    "deployment": ("alchemist_ray/deploy", "cray", "kuberay"),
    "observation": ("alchemist_ray/measures", "alchemist_ray/observe"),
    "papers": ("benchmarks/papers",),
}  # fmt: skip
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def tracked() -> list[Path]:
    """The source files that git tracks or would add."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [
        ROOT / name for name in names if Path(name).suffix in SUFFIXES and (ROOT / name).exists()
    ]


def code_lines(path: Path) -> int:
    """The lines of ``path`` that hold code."""
    text = path.read_text()
    if path.suffix != ".py":
        bare = C_COMMENT.sub("", text)
        if path.suffix == ".f90":
            bare = re.sub(r"![^\n]*", "", text)
        return sum(bool(line.strip()) for line in bare.splitlines())
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type not in skipped | {tokenize.ENCODING, tokenize.ENDMARKER}:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def part(path: Path) -> str:
    """The row of the table that ``path`` belongs to."""
    names = path.relative_to(ROOT).parts[:-1]
    return "/".join(names[: 1 if names[:1] in (("cray",), ("benchmarks",)) else 2]) or "."


def capability(path: Path) -> str:
    """What ``path`` is for; empty if it is for developers."""
    name = path.relative_to(ROOT).as_posix()
    begins = [
        (len(folder), what)
        for what, folders in CAPABILITIES.items()
        for folder in folders
        if name.startswith(f"{folder}/")
    ]
    return max(begins, default=(0, ""))[1]


def main() -> None:
    """Print lines of code and numbers of Python files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list each file")
    options = parser.parse_args()
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    purposes: Counter[str] = Counter()
    for path in tracked():
        count = code_lines(path)
        if options.files:
            print(f"{count:6d} {path.relative_to(ROOT)}")
        lines[part(path)] += count
        purposes[capability(path)] += count
        modules[part(path)] += path.suffix == ".py"
        folders[str(path.parent.relative_to(ROOT))] += path.suffix == ".py"
    if not options.files:
        for name in sorted(lines):
            print(f"{lines[name]:7d} {modules[name]:4d}  {name}")
    for name in CAPABILITIES:
        print(f"{purposes[name]:7d} {name}")
    own = [name for name in lines if name.split("/")[0] not in APART]
    tests = [name for name in lines if name.split("/")[0] == "tests"]
    print(
        f"{sum(lines[n] for n in own)} lines of code, {sum(modules[n] for n in own)} Python files"
    )
    print(f"{sum(lines[n] for n in tests)} lines of tests")
    large = {n: c for n, c in folders.items() if c > 20 and n.split("/")[0] not in APART}
    print(f"folders with more than 20 Python files: {large or 'none'}")


if __name__ == "__main__":
    main()
