"""Rules of the modules of a step: short signatures, types, no side channels."""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jshard"
LIBRARY = ("layout", "collectives", "cpu", "units", "pipeline", "step")
ROOMS = tuple(f"sharding/{name}" for name in LIBRARY)
TRACED = (*ROOMS, "sharding/update", "sharding/axes", "nn")
LONGEST = 7  # positional parameters
# Not "update", which is a method of optimizers, too.
CHANGES = {"append", "extend", "insert", "add", "setdefault", "pop"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(room: str) -> list[Path]:
    path = PACKAGE / room
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def too_long(tree: ast.Module) -> Iterator[str]:
    """Functions, nested ones and methods too, with too many positional parameters."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            if len(names) - (names[:1] in (["self"], ["cls"])) > LONGEST:
                yield f"{node.lineno}: {node.name} has {len(names)}"


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
        if node.returns is None and node.name != "__init__":
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


def problems(room: str, rule: Callable[[ast.Module], Iterable[str]]) -> list[str]:
    assert files(room)
    return [
        f"{path.relative_to(PACKAGE)}:{problem}"
        for path in files(room)
        for problem in rule(ast.parse(path.read_text()))
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_no_function_has_more_than_seven_positional_parameters(room):
    assert not problems(room, too_long)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_function_has_types(room):
    assert not problems(room, lambda module: untyped(module.body))


@pytest.mark.parametrize("room", TRACED)
def test_results_leave_functions_as_what_they_return(room):
    assert not problems(room, side_channels)


def test_the_rules_find_what_they_are_for():
    bad = ast.parse(
        "def f(a, b, c, d, e, f, g, h): ...\nclass A:\n def m(self, x): ..."
    )
    assert list(too_long(bad)) == ["1: f has 8"]
    assert [problem.split(" ")[1] for problem in untyped(bad.body)] == ["f", "m"]
    leaks = "def f():\n x = []\n def g(y):\n  x.append(y)\n  x[:] = [y]\n  return g"
    assert len(list(side_channels(ast.parse(leaks)))) == 2
    ours = "def f():\n def g(y):\n  x = []\n  x.append(y)\n  return x\n return g"
    assert not list(side_channels(ast.parse(ours)))
