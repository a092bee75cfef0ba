"""Working as another user, to meet files and folders that are closed; only root can try."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """The block runs as a user who owns nothing."""
    if not hasattr(os, "seteuid") or os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
