"""The list of complete checkpoints in a bucket, ``steps.json``, and who may change it.

It is replaced when all else of a checkpoint is written, and a step that is deleted
leaves it first. Listings of the bucket decide nothing.
"""

import itertools
import json
import re
import secrets
from collections.abc import Callable

from jshard.storage.checkpoint.buckets.objects import MISSING, Objects, Overtaken
from jshard.system.errors import UserError, some_of
from jshard.system.files.untrusted import parse_json

FILE = "steps.json"
_ATTEMPTS = 10  # to become its owner while another run saves there
FORMAT = 1  # incremented when an older jshard could not read it
_OURS = re.compile(r"\d+-[0-9a-f]{8}")  # how an attempt is called; all else is others'
Names = dict[int, str]  # the name of each step's folder, as "100-1f2e3d4c"


def read(objects: Objects) -> Names:
    """Returns the complete steps below a URL.

    Raises:
      UserError: Their list is damaged or missing, or a newer jshard wrote it.
    """
    return _read(objects)[0]


def attempts(objects: Objects) -> list[str]:
    """Returns the names of all saves below a URL, complete or not, sorted."""
    found = {path.partition("/")[0] for path in objects.paths()}
    return sorted(name for name in found if _OURS.fullmatch(name))


def _read(objects: Objects) -> tuple[Names, str, bytes]:
    """Returns the steps, the list's owner and its generation."""
    content, generation = objects.read(FILE)
    where = f"{objects.url}/{FILE}"
    if content is None:
        if kept := attempts(objects):  # the list is written before the first of them
            raise UserError(
                f"{where} is missing, and with it which of {some_of(kept, limit=3)} is "
                "a complete step: restore it, or give another URL"
            )
        return {}, "", MISSING
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

    Args:
      objects: What is below the URL.
      owner: Who has become its owner before; "" becomes it now.

    Attributes:
      owner: Tells this process from others that save there.
      names: The steps that it found.

    Raises:
      BucketError: It cannot be written.
      Overtaken: ``owner`` is not the owner any more.
    """

    def __init__(self, objects: Objects, owner: str = ""):
        self._objects, self.owner = objects, owner or secrets.token_hex(8)
        self.names = self.check()[0] if owner else self._take()  # at the start

    def _take(self) -> Names:
        for attempt in itertools.count(1):
            names, _, generation = _read(self._objects)
            try:
                self._write(names, generation)
            except Overtaken:  # by a run that saves there now: the later start has it
                if attempt == _ATTEMPTS:
                    raise
                continue
            return names
        raise AssertionError("the loop has no end")

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
        if owner != self.owner:
            raise Overtaken(
                "another run, which was started later, saves there", self._objects.url
            )
        return names, generation

    def _write(self, names: Names, generation: bytes) -> None:
        steps = {str(step): name for step, name in sorted(names.items())}
        content = {
            "format": FORMAT,
            "owner": self.owner,
            "steps": steps,
            "write": secrets.token_hex(4),  # no two are equal, nor their ETags
        }
        text = json.dumps(content, indent=1).encode()
        self._objects.replace(FILE, text, instead_of=generation)
