"""Continues prompts: `python -m jshard.generate --model=RUN_OR_DIR --prompt=TEXT`."""

from jshard.inference.trained.generate_command import main

if __name__ == "jshard.generate":
    # Python would put this module in place of the function of its name.
    raise ImportError(
        "jshard.generate is a function of jshard, and a command; it is not a module to "
        "import: import jshard, or run python -m jshard.generate"
    )

if __name__ == "__main__":
    main()
