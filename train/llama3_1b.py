"""Llama 3.2 1B: llama.py:3-1b by another name."""

from functools import partial

from train.llama import *  # noqa: F403
from train.llama import get_config

get_config = partial(get_config, "3-1b")
