"""The shell script in which the launcher runs a process, here or on another host."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from jshard.system.network.secret import SECRET

# Reads the job's secret, which must not be on a command line, from standard input. Runs
# a command and sends it the signals that are named there next. When standard input
# ends, because the launcher was killed or the connection is cut, the command is asked
# to save and end, and killed if that takes too long. The shell says nothing of that:
# what ended is reported in other places.
_RUN = """
exec 3<&0 4>&2
read -r {secret} <&3 || exit 1
export {secret}
{command} </dev/null 3<&- 4>&- &
pid=$!
(
  while read -r name <&3; do kill -s "$name" $pid; done
  kill -s TERM $pid &&
    (echo "jshard: the launcher is gone: process {index} saves and ends" >&4)
  n=0
  while [ $n -lt {patience} ] && kill -0 $pid; do sleep 1; n=$((n + 1)); done
  kill -s KILL $pid
) 2>/dev/null &
reader=$!
wait $pid 2>/dev/null
code=$?
kill $reader 2>/dev/null
exit $code
"""


def shell_script(
    command: Sequence[str], index: int, patience: float, folder: Path | None = None
) -> str:
    """Returns the script that runs a command, in a folder if one is given.

    Args:
      command: Its words.
      index: Of the process.
      patience: Seconds for it to save and end without the launcher.
      folder: Where to run it.
    """
    run = f"exec {shlex.join(command)}"
    if folder is not None:
        run = f"sh -c {shlex.quote(f'cd {shlex.quote(str(folder))} && {run}')}"
    return _RUN.format(
        command=run, index=index, patience=round(patience), secret=SECRET
    )
