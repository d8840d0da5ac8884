"""Names on the Hugging Face Hub, told apart from local paths.

ORG/NAME or ORG/NAME@REVISION is a model at a branch, a tag or a commit. hf:// may stand
before it, and must where a local path of the same form exists, which comes first, as
does RUN@STEP of a local run.
hf://datasets/ORG/NAME@REVISION/PATH is a file or a folder of a dataset. A dataset that
is streamed has a name like a model's, too.
"""

import dataclasses
import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

from jshard.storage.checkpoint.selected.run_address import names_step
from jshard.system.errors import UserError

COMMIT = re.compile(r"@([0-9a-f]{40})(?=/|$)")
_BAD = re.compile(r"--|\.\.")
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?P<scheme>hf:/{{1,2}}(?P<datasets>datasets/)?)?(?P<repository>{_PART}/{_PART})"
    r"(?:@(?![0-9a-f]{40}(?:/|$))(?P<revision>refs/\w+/[^@/]+|[^@/:]+))?"
    r"(?:@(?P<commit>[0-9a-f]{40}))?(?:/(?P<path>[^/].*))?",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class Name:
    """A name on the Hub; its text is one that `parse` reads.

    Attributes:
      repository: ORG/NAME.
      revision: The branch or tag that was asked for; "" for the main branch.
      commit: 40 digits; "" if it is still to be found.
      kind: "model" or "dataset".
      path: Of a file or folder of a dataset; "" for all of it.
    """

    repository: str
    revision: str = ""
    commit: str = ""
    kind: str = "model"
    path: str = ""

    def __str__(self) -> str:
        scheme = "hf://datasets/" if self.kind == "dataset" else "hf://"
        parts = (self.repository, quote(self.revision, safe=""), self.commit)
        return (
            scheme + "@".join(filter(None, parts)) + f"/{self.path}" * bool(self.path)
        )


def parse(text: str | Path, kind: str = "model") -> Name | None:
    """Returns the name of a model or a dataset that a text is; None for a local path.

    Args:
      text: A name or a path.
      kind: "model"; "dataset", whose names begin with hf://; or "stream", a dataset
        whose name may.

    Raises:
      UserError: It begins with hf:// and is no such name.
    """
    match = _NAME.fullmatch(str(text))
    # The Hub has no others.
    if match and (len(match["repository"]) > 96 or _BAD.search(match["repository"])):
        match = None
    if match and match["path"] and not match["datasets"]:  # a model is a whole
        match = None
    if match is None:
        if str(text).startswith("hf:/"):
            raise UserError(
                f"{text}: no name on the Hugging Face Hub, such as hf://ORG/MODEL, "
                "hf://ORG/MODEL@REVISION or hf://datasets/ORG/DATASET@REVISION/PATH"
            )
        return None
    if not match["scheme"] and (kind == "dataset" or os.path.exists(text)):
        return None
    if not match["scheme"] and kind == "model" and names_step(str(text)):
        return None
    needed = "model" if kind == "model" else "dataset"
    bare = kind == "stream" and not match["scheme"]
    if (found := "dataset" if match["datasets"] or bare else "model") != needed:
        names = "hf://datasets/ORG/NAME" if needed == "dataset" else "ORG/NAME"
        raise UserError(f"{text} names a {found}: give a {needed} here, like {names}")
    revision, commit = unquote(match["revision"] or ""), match["commit"] or ""
    return Name(match["repository"], revision, commit, needed, match["path"] or "")
