"""``python -m jshard.plan``."""

from jshard.plan.command_line import main

if __name__ == "__main__":
    main()
