"""Which files are to train on, by their names: the rule of Hugging Face's `datasets`.

A word of a split in the name of a folder, or else in that of the file, says it. Words
are between "-", ".", "_", " ", digits and the ends, so that "trainval" is none. Where
files are named for training, those without such a word are left out, as there; where
none are, they are trained on. Beyond that rule, words may be in capitals, and "heldout"
is for validation.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from jshard.system.errors import UserError, some_of

_WORDS = {
    "train": "train|training",
    "validation": r"validation|valid|val|dev|held[-_ ]?out|holdout",
    "test": "test|testing|eval|evaluation",
}
_NAMED = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{words})(?:[-._ 0-9]|$)", re.IGNORECASE)
    for split, words in _WORDS.items()
}


class NamedSplits(NamedTuple):
    """Names of files, in their order.

    Attributes:
      train: What to train on.
      validation: What to validate with.
      left_out: The others, by why they are left out.
    """

    train: list[str]
    validation: list[str]
    left_out: dict[str, list[str]]

    def __str__(self) -> str:
        """Says which files are for what; "" if names say nothing."""
        if not self.validation and not self.left_out:
            return ""
        parts = [f"train on {_files(self.train)}"]
        if self.validation:
            parts.append(f"validate with {_files(self.validation)}")
        parts += [f"leave out {_files(x)}, {why}" for why, x in self.left_out.items()]
        return "; ".join(parts)


def _files(names: Sequence[str]) -> str:
    return f"{len(names)} file{'s' * (len(names) > 1)} ({some_of(names, limit=3)})"


def split_of(name: str) -> str:
    """Returns the split that a file's path in its folder names, or "".

    Raises:
      UserError: It names the one to train on and another one.
    """
    *folders, file = name.split("/")
    for parts in (folders, [file]):
        found = [
            split for split, word in _NAMED.items() if any(map(word.search, parts))
        ]
        if len(found) > 1 and found[0] == "train":
            raise UserError(
                f"{name}: is named for both {found[0]} and {found[1]}; rename it to "
                "say which it is"
            )
        if found:
            return found[-1]
    return ""


def named_splits(names: Sequence[str]) -> NamedSplits:
    """Divides the files of a folder by their names.

    Raises:
      UserError: None is to train on, or a name says two things.
    """
    of_split: dict[str, list[str]] = {split: [] for split in ("", *_WORDS)}
    for name in names:
        of_split[split_of(name)].append(name)
    train, left_out = of_split["train"], {}
    if not train:
        train = of_split[""]
    elif of_split[""]:
        left_out["whose names say no split"] = of_split[""]
    if of_split["test"]:
        left_out["named as test data"] = of_split["test"]
    if not train:
        raise UserError(
            f"{names[0]}: this and all other files in data.path are named as "
            "validation or test data; rename those to train on"
        )
    return NamedSplits(train, of_split["validation"], left_out)
