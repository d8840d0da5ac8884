"""The list of complete checkpoints in a bucket, ``steps.json``, and who may change it.

It is replaced when all else of a checkpoint is written, and a step that is deleted
leaves it first. Listings of the bucket decide nothing.
"""

import json
import re
import secrets
from collections.abc import Callable

from jshard.checkpoint.buckets.objects import MISSING, Objects, Overtaken
from jshard.checkpoint.untrusted import parse_json
from jshard.errors import UserError

FILE = "steps.json"
FORMAT = 1  # incremented when an older jshard could not read it
Names = dict[int, str]  # the name of each step's folder, as "100-1f2e3d4c"


def read(objects: Objects) -> Names:
    """Returns the complete steps below a URL.

    Raises:
      UserError: Their list is damaged, or a newer jshard wrote it.
    """
    return _read(objects)[0]


def _read(objects: Objects) -> tuple[Names, str, bytes]:
    """Returns the steps, the list's owner and its generation."""
    content, generation = objects.read(FILE)
    if content is None:
        return {}, "", MISSING
    where = f"{objects.url}/{FILE}"
    try:
        found = parse_json(content)
        if found["format"] > FORMAT:
            raise UserError(f"{where} was written by a newer jshard: upgrade jshard")
        names = {int(step): name for step, name in found["steps"].items()}
        owner = found["owner"]
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where} is damaged: restore it, or give another URL"
        ) from error
    if not all(re.fullmatch(rf"{s}-[0-9a-f]+", str(n)) for s, n in names.items()):
        raise UserError(f"{where} is damaged: it names no folders of steps")
    return names, str(owner), generation


class StepList:
    """The list below a URL, of which this process becomes the owner.

    Attributes:
      names: The steps that it found.

    Raises:
      BucketError: It cannot be written.
    """

    def __init__(self, objects: Objects):
        self._objects, self._owner = objects, secrets.token_hex(8)
        self.names, _, generation = _read(objects)  # at the start
        self._write(self.names, generation)

    def change(self, changed: Callable[[Names], Names]) -> tuple[Names, Names]:
        """Replaces the steps by what ``changed`` returns; returns old and new ones.

        Raises:
          Overtaken: Another process has become the owner.
        """
        before, generation = self.check()
        after = changed(before)
        self._write(after, generation)
        return before, after

    def check(self) -> tuple[Names, bytes]:
        """Returns the steps and the list's generation.

        Raises:
          Overtaken: Another process has become the owner.
        """
        names, owner, generation = _read(self._objects)
        if owner != self._owner:
            raise Overtaken(
                "another run, which was started later, saves there", self._objects.url
            )
        return names, generation

    def _write(self, names: Names, generation: bytes) -> None:
        steps = {str(step): name for step, name in sorted(names.items())}
        content = {
            "format": FORMAT,
            "owner": self._owner,
            "steps": steps,
            "write": secrets.token_hex(4),  # no two are equal, nor their ETags
        }
        text = json.dumps(content, indent=1).encode()
        self._objects.replace(FILE, text, instead_of=generation)
