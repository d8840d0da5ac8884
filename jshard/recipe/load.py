"""Finds a recipe's file, and imports it as Python imports a script."""

import ast
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from jshard.recipe.definition import Recipe, recipe_of
from jshard.recipe.recipe_path import find_recipe, split_path
from jshard.system.errors import UserError

__all__ = ["find_recipe", "load_recipe", "open_recipe", "own_folder"]


@contextmanager
def open_recipe(path: str | Path) -> Iterator[Recipe]:
    """Loads a recipe; inside the block it finds the modules beside it.

    Args:
      path: The recipe's file, with `:ARGUMENT` if it takes one, as `find_recipe`
        returns it.

    Raises:
      UserError: The file cannot be read, parsed or imported, or lacks a function.
    """
    file, argument = split_path(str(path))
    with own_folder(Path(file)):
        yield load_recipe(Path(file), argument)


@contextmanager
def own_folder(file: Path) -> Iterator[None]:
    """Within it modules are looked for beside a recipe first, as beside a script."""
    folder = str(file.parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def load_recipe(file: Path, argument: str | None) -> Recipe:
    """Executes a recipe's file, within `own_folder` of it."""
    try:
        module = _execute(file)
    except SyntaxError as error:
        where = f"{error.filename or file}:{error.lineno}"
        raise UserError(f"syntax error in recipe: {where}: {error.msg}") from error
    except ImportError as error:
        _check_own_modules(file)
        frames = traceback.extract_tb(error.__traceback__)
        where = next(
            f"{frame.filename}:{frame.lineno}"
            for frame in reversed(frames)
            if not frame.filename.startswith("<frozen")
        )
        raise UserError(f"recipe cannot be imported: {where}: {error}") from error
    except OSError as error:
        raise UserError(f"recipe {file} cannot be read: {error.strerror}") from error
    _check_own_modules(file)
    return recipe_of(module, file, argument)


def _execute(file: Path) -> types.ModuleType:
    # By its path: two recipes of one name are two modules.
    spec = importlib.util.spec_from_file_location(f"recipe {file}", file)
    assert spec is not None
    assert spec.loader is not None
    # Dataclasses and pickle look for the module of a class there.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    # No other process finds a module of this name: data loaders' get what it defines.
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    return module


def own_modules(file: Path) -> dict[str, Path]:
    """Returns the files of the imported modules that are in a recipe's folder."""
    folder = f"{file.parent}{os.sep}"
    return {
        name: Path(path)
        for name, path in _imported_files().items()
        if path.startswith(folder)
        and path.removeprefix(folder).split(os.sep)[0] in _names(name.split(".")[0])
        and name.split(".")[0] != "jshard"
    }


def _names(module: str) -> tuple[str, str]:
    return module, f"{module}.py"


def _imported_files() -> dict[str, str]:
    files = {name: getattr(x, "__file__", None) for name, x in [*sys.modules.items()]}
    return {name: str(file) for name, file in files.items() if file}


def _check_own_modules(file: Path) -> None:
    """Checks that what a recipe imports from its own folder was found there.

    Python has one module of a name in a process. If another project was imported
    first, its `models` would be taken for this recipe's.

    Raises:
      UserError: A module was found elsewhere.
    """
    imported = _imported_files()
    for importer in (file, *own_modules(file).values()):
        for name in sorted(_imports(importer)):
            own = [file.parent / x for x in _names(name) if (file.parent / x).exists()]
            for module, path in imported.items() if own else ():
                if module.split(".")[0] != name:
                    continue
                if not Path(path).resolve().is_relative_to(file.parent):
                    raise UserError(
                        f"{importer} imports {name!r}, and Python has {path} for it "
                        f"instead of {own[0]}: if that is another project's, load this "
                        "recipe in a process of its own; if it is a library's, rename "
                        f"{own[0].name}"
                    )


def _imports(file: Path) -> set[str]:
    """Returns the first parts of the names of the modules that a file imports."""
    names = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(str(node.module))
    return {name.split(".")[0] for name in names}
