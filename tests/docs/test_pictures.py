"""The pictures of README.md and of the site's first page show what README says."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from jshard.system.pages.png import png

REPOSITORY = Path(__file__).parents[2]
MADE = runpy.run_path(str(REPOSITORY / "docs/pictures.py"))


@pytest.mark.parametrize(
    "name", ["pictures", "pictures_phone", "_static/plan", "_static/plan_phone"]
)
def test_a_picture_of_the_plan_has_the_figures_of_readme(name):
    picture = (REPOSITORY / f"docs/{name}.png").read_bytes()
    kept = picture.partition(MADE["KEYWORD"])[2].partition(b"IEND")[0][:-8].decode()
    block = re.search(
        r"^step +[\d.]+ ms.*?^```", (REPOSITORY / "README.md").read_text(), re.M | re.S
    )
    assert block
    assert len(figures := kept.split(", ")) >= 6
    assert [x for x in figures if x.removesuffix(" GiB") not in block[0]] == []


def test_a_text_in_a_picture_leaves_it_a_picture(tmp_path):
    file = tmp_path / "dot.png"
    file.write_bytes(png(np.zeros((2, 2))))
    MADE["keep_text"](file, "879.0 ms")
    image = pytest.importorskip("PIL.Image").open(file)
    image.load()
    assert image.text == {"figures": "879.0 ms"}
