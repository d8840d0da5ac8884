"""Paths that no file can have."""

import os


def path_problem(path: str) -> str:
    """What is wrong with a path's form, as "is too long"; empty where nothing is.

    Args:
      path: As the user gave it; nothing need be there.
    """
    if "\0" in path:
        return "holds a zero byte, which no path does"
    parts = os.fsencode(os.path.expanduser(path)).split(os.fsencode(os.sep))
    if max(map(len, parts)) > 255 or sum(len(part) + 1 for part in parts) > 4000:
        return "is too long for a path"
    return ""
