"""Settings shared by all tests: no hub access, and GPU tests only where there is a GPU."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A temporary folder that every user may enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="dspine-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        yield Path(name).resolve()
