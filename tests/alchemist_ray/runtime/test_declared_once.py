"""Messages are declared in tables alone: senders, handlers and other code agree with them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from alchemist_ray.runtime.commands.nodes import Nodes
from mpi_workers.node.proxy import Proxy
from mpi_workers.protocol.commands import COMMANDS, Command
from mpi_workers.protocol.proxy_messages import PROXY_COMMANDS, PROXY_EVENTS

ROOT = Path(__file__).parents[3]
SENDERS = {"_tell": PROXY_COMMANDS, "send_event": PROXY_EVENTS, "_report_last": PROXY_EVENTS}
RANKS_END = {"exit"}  # of a proxy to its ranks


def trees(*folders: str) -> Iterator[ast.AST]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text(), str(path))


def nodes_of(*folders: str) -> Iterator[ast.AST]:
    for tree in trees(*folders):
        yield from ast.walk(tree)


@pytest.mark.parametrize(
    ("owner", "table", "given"), [(Proxy, PROXY_COMMANDS, 1), (Nodes, PROXY_EVENTS, 2)]
)
def test_each_message_has_a_handler_with_its_fields(
    owner: type, table: dict[str, str], given: int
) -> None:
    handlers = {name.removeprefix("_on_") for name in vars(owner) if name.startswith("_on_")}
    assert table.keys() <= handlers
    for op, fields in table.items():
        parameters = list(inspect.signature(getattr(owner, f"_on_{op}")).parameters)
        assert sorted(parameters[given:]) == sorted(fields.split()), op


def test_each_message_is_sent_with_its_fields_and_none_is_undeclared() -> None:
    sent = set()
    for node in nodes_of("alchemist_ray/runtime", "mpi_workers/node"):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        table = SENDERS.get(node.func.attr)
        if table is None or not node.args or not isinstance(node.args[0], ast.Constant):
            continue
        op = str(node.args[0].value)
        names = {keyword.arg for keyword in node.keywords} - {"but"}
        if None not in names:  # else a rank has sent it
            assert names == set(table[op].split()), f"{op}, line {node.lineno}"
        sent.add(op)
    assert sent == {*PROXY_COMMANDS, *PROXY_EVENTS}
    assert not PROXY_COMMANDS.keys() & COMMANDS.keys()


def test_code_of_the_gang_names_only_operations_that_are_declared() -> None:
    """In ``{"op": "..."}``, in patterns, and where ``body["op"]`` is compared."""
    folders = ("alchemist_ray/runtime", "alchemist_ray/attached", "mpi_workers/node",
               "mpi_workers/rank", "mpi_workers/protocol")  # fmt: skip
    named = set()
    for node in nodes_of(*folders):
        if isinstance(node, ast.Dict | ast.MatchMapping):
            values = node.values if isinstance(node, ast.Dict) else node.patterns
            for key, value in zip(node.keys, values, strict=True):
                if ast.unparse(key or ast.Constant(0)) == "'op'":
                    named |= {one.value for one in ast.walk(value) if isinstance(one, ast.Constant)}
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("['op']"):
            for compared in node.comparators:
                named |= {one.value for one in ast.walk(compared) if isinstance(one, ast.Constant)}
    assert {"resize", "keep_copies", "create", "call"} <= named
    assert named <= {*COMMANDS, *PROXY_COMMANDS, *PROXY_EVENTS, *RANKS_END}


def test_no_list_of_commands_stands_beside_the_table() -> None:
    """A field of `Command` says it: lists such as MAKES or SEE_NO_ARRAYS, and arguments, went."""
    properties = set(Command.__dataclass_fields__) - {"fields", "ranks", "scope"}
    for node in nodes_of("alchemist_ray", "mpi_workers"):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            ops = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            assert len(COMMANDS.keys() & set(map(str, ops))) < 4, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("nodes.round"):
            assert not {keyword.arg for keyword in node.keywords} & properties, ast.unparse(node)
