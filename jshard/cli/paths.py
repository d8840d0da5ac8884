"""Checks the form of paths that users give."""

import os


def path_problem(path: str) -> str:
    """Returns why no file can have this path, as "is too long"; empty if one can."""
    if "\0" in path:
        return "holds a zero byte, which no path does"
    if path.startswith("~") and os.path.expanduser(path) == path:
        return "begins with the name of an unknown user"
    parts = os.fsencode(os.path.expanduser(path)).split(os.fsencode(os.sep))
    if max(map(len, parts)) > 255 or sum(len(part) + 1 for part in parts) > 4000:
        return "is too long for a path"
    return ""
