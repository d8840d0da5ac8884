"""pytest's option that writes contracts anew (``jshard.testing.assert_plan``).

pytest loads it by the entry point wherever jshard is installed, so it imports nothing.
"""

import os
from typing import Any

UPDATE = "JSHARD_UPDATE_CONTRACTS"


def pytest_addoption(parser: Any) -> None:
    """Adds the option."""
    parser.getgroup("jshard").addoption(
        "--update-contracts",
        action="store_true",
        help="write the contracts of jshard.testing.assert_plan in place of comparing",
    )


def pytest_configure(config: Any) -> None:
    """Tells ``assert_plan``, in processes that the tests start as well."""
    if config.getoption("--update-contracts"):
        os.environ[UPDATE] = "1"
