"""How a recipe is named on the command line: a file, and maybe an argument."""

import re
from pathlib import Path

from jshard.system.cli.options import Option
from jshard.system.errors import UserError

# Of the commands that run a recipe.
RECIPE_OPTIONS = {
    "config": Option(
        None, "the recipe: a path, a file in ./train/, or a packaged recipe, e.g. "
        "gpt.py", kind=Path, required=True, shown="FILE",
    ),
    "config.KEY": Option(
        "", "sets one of the recipe's keys, e.g. --config.steps=100", shown="VALUE"
    ),
}  # fmt: skip


def packaged_recipes() -> Path:
    """Returns the folder of the recipes that come with jshard."""
    return Path(__file__).parents[1] / "recipes"  # in a checkout, a link to train/


def find_recipe(name: str) -> str:
    """Finds a recipe: as given, then in `./train/`, then among the packaged ones.

    Args:
      name: A path or a file name, with or without `.py`, and `:ARGUMENT` if the recipe
        takes one.

    Returns:
      The name with the absolute path of the file, for `open_recipe`.

    Raises:
      UserError: There is no such file; the message lists where it was looked for.
    """
    given, argument = split_path(name)
    file_name = given if given.endswith(".py") else f"{given}.py"
    folders = (Path(), Path("train"), packaged_recipes())
    candidates = [folder / file_name for folder in folders]
    for candidate in candidates:
        if candidate.is_file():
            return join_path(str(candidate.resolve()), argument)
    raise UserError(f"no recipe {name!r}: looked for {', '.join(map(str, candidates))}")


def short_name(path: str) -> str:
    """Returns "llama:3-8b" for "train/llama.py:3-8b"."""
    file, argument = split_path(path)
    return join_path(Path(file).stem, argument)


def split_path(path: str) -> tuple[str, str | None]:
    """Returns a recipe's file and its argument, if it has one."""
    match = re.fullmatch(r"(.*?\.py|[^:]*)(?::(.*))?", path, re.DOTALL)
    assert match is not None
    return match[1], match[2]


def join_path(file: str, argument: str | None) -> str:
    """Returns what `split_path` splits."""
    return file if argument is None else f"{file}:{argument}"
