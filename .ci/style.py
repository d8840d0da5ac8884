"""Checks modules: short signatures, types, no side channels.

    python .ci/style.py

prints what is wrong, and exits with 1 if anything is. It needs Python alone.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TRACED = ("sharding", "nn")  # rooms whose functions JAX traces
LONGEST = 7  # positional parameters
# Not "update", which is a method of optimizers, too.
CHANGES = {"append", "extend", "insert", "add", "setdefault", "pop"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def too_long(tree: ast.Module) -> Iterator[str]:
    """Functions, nested ones and methods too, with too many positional parameters."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            number = len(names) - (names[:1] in (["self"], ["cls"]))
            if number > LONGEST:
                yield f"{node.lineno}: {node.name} has {number} positional parameters"


def untyped(body: list[ast.stmt]) -> Iterator[str]:
    """Public functions, and public methods of public classes, that lack a type."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from untyped(node.body)
        if not isinstance(node, Function):
            continue
        if node.name.startswith("_") and not node.name.startswith("__"):
            continue
        a = node.args
        given = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        lacks = [x.arg for x in given if x and not x.annotation]
        lacks = [name for name in lacks if name not in ("self", "cls")]
        if node.returns is None and node.name not in ("__init__", "__post_init__"):
            lacks.append("return")
        if lacks:
            yield f"{node.lineno}: {node.name} has no type of {', '.join(lacks)}"


def side_channels(tree: ast.Module) -> Iterator[str]:
    """Where a function inside another one changes what belongs to the outer one."""
    functions = [n for n in ast.walk(tree) if isinstance(n, Function)]
    nested = {f for g in functions for f in ast.walk(g) if f is not g}
    for function in functions:
        if function not in nested:
            continue
        own = {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
        own |= {
            n.id
            for n in ast.walk(function)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        for node in ast.walk(function):
            names = node.names if isinstance(node, ast.Nonlocal) else _changed(node)
            for name in set(names) - (set() if isinstance(node, ast.Nonlocal) else own):
                yield f"{getattr(node, 'lineno', 0)}: {function.name} changes {name}"


def _changed(node: ast.AST) -> list[str]:
    """The name of the list, set or dict that a statement or call changes in place."""
    target = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        target = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        target = node.func.value if node.func.attr in CHANGES else None
    return [target.id] if isinstance(target, ast.Name) else []


def problems() -> Iterator[str]:
    """What is wrong, a line each."""
    for path in sorted((REPOSITORY / "jshard").rglob("*.py")):
        tree, name = ast.parse(path.read_text()), path.relative_to(REPOSITORY)
        found = [*too_long(tree), *untyped(tree.body)]
        if name.parts[1] in TRACED:
            found += side_channels(tree)
        yield from (f"{name}:{problem}" for problem in found)


if __name__ == "__main__":
    print(*(found := [*problems()]), sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))
