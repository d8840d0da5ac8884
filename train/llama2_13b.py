"""Llama 2 13B: llama.py:2-13b by its former name."""

from functools import partial

from train.llama import *  # noqa: F403
from train.llama import get_config

get_config = partial(get_config, "2-13b")
