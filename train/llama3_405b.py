"""Llama 3 405B: llama.py:3-405b by its former name."""

from functools import partial

from train.llama import *  # noqa: F403
from train.llama import get_config

get_config = partial(get_config, "3-405b")
