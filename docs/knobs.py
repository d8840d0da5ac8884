"""Writes docs/knobs.md from the declarations: `python docs/knobs.py`."""

from pathlib import Path

from jshard.config.shared_keys import REQUIRED, SHARED

FILE = Path(__file__).with_name("knobs.md")
HEADING = """\
# Config keys of every recipe

What every recipe can set, as `--config.KEY=VALUE` or in its `get_config`. Those of
`policy` are the fields of `jshard.Policy`. `python docs/knobs.py` writes this page from
the declarations in `jshard/fsdp/policy.py`, `jshard/fsdp/precision.py` and
`jshard/config/shared_keys.py`; `python -m jshard.train --config=FILE --help`
lists a recipe's own keys, too.

| Key | Default | Possible | Meaning |
|---|---|---|---|
"""


def page() -> str:
    """The page, as Markdown."""
    rows = []
    for key, knob in SHARED.items():
        default = "required" if key in REQUIRED else f"`{knob.default!r}`"
        rows.append(f"| `{key}` | {default} | {knob.possible()} | {knob.help} |\n")
    return HEADING + "".join(rows)


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
