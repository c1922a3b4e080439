"""Figures are drawn with matplotlib's own settings, whatever file of settings there is at home."""

from collections.abc import Iterator

import matplotlib
import pytest


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield
