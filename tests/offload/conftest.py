"""Fixtures of streamers and tiers."""

from typing import Any

import pytest
from support.layers import on_disk
from support.streams import stream_layers


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_disk(tmp_path_factory.mktemp("stream"), list(stream_layers()), n_files=3, shuffle=5)
