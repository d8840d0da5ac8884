"""Objects of a bucket, for each test apart."""

import re

import pytest

from bucket_servers import Folder, running
from jshard.storage.checkpoint.buckets.objects import Objects


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with running(Folder, tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def there(store, request) -> Objects:
    name = re.sub(r"\W+", "-", request.node.name)
    return Objects(f"{store.url}/{name}/")
