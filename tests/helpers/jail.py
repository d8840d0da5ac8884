"""Processes that can write to one folder only: for code and names changed at random."""

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# A mutant of code that deletes files deletes others: one has removed /etc. So they run
# where every file system is read-only but one folder.
JAIL = """set -e
mount --bind "$1" "$1"
while read -r _ place type _; do
  case "$place $type" in
    "$1 "* | "/dev/"* | *" proc" | *" sysfs" | *" cgroup"* | *" dev"*) ;;
    *) mount -o remount,bind,ro "$place" ;;
  esac
done </proc/self/mounts
export TMPDIR="$1/.tmp"
mkdir -p "$TMPDIR"
shift
exec "$@"
"""


def jailed(folder: Path, command: list[str]) -> list[str]:
    """A command that can write below a folder only; on Linux, without privileges."""
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    return [*namespaces, "sh", "-c", JAIL, "sh", str(folder), *command]


def check_jail(folder: Path) -> None:
    """Tries to write within the jail, and outside of it.

    Raises:
      SystemExit: what must not be written can be, or the jail cannot be made.
    """
    places = [folder, folder.parent, REPOSITORY, Path.home()]
    files = [place / f".written-{folder.name}" for place in places]
    command = jailed(folder, ["sh", "-c", 'touch "$@"; :', "sh", *map(str, files)])
    done = subprocess.run(command, capture_output=True, text=True)
    written = [file for file in files if file.exists()]
    for file in written:
        file.unlink()
    if written != files[:1]:
        raise SystemExit(
            "what is changed at random can delete any file, and cannot be confined to "
            f"a folder here by unshare --user --mount: {done.stderr.strip() or written}"
        )
