"""Lists the commands: `python -m jshard`."""

from jshard.system.cli.command import run_command
from jshard.system.cli.commands import COMMANDS
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError


def main() -> None:
    """Runs the command line; exits with 0, or 2 for an unknown argument."""
    run_command(_list)


def _list(argv: list[str]) -> None:
    for word in argv:
        if word in COMMANDS:
            raise UserError(f"{word} is a command of its own: python -m jshard.{word}")
        if word not in ("--help", "-h"):
            raise UserError(f"unknown argument {word!r}; python -m jshard lists all")
    show("usage: python -m jshard.COMMAND [--help] ...\n")
    for name, does in COMMANDS.items():
        show(f"  {name:<10} {does}")


if __name__ == "__main__":
    main()
