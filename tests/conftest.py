"""Settings of all tests; their fixtures are in support/shared_fixtures.py."""

import machine  # isort: skip  # noqa: F401  # First: it sets the environment that the others read.

import gc
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every machine, and no clock: a slow machine is no error. To look for new counterexamples, use
# `pytest --hypothesis-profile search`.
NO_CLOCK: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("same", derandomize=True, **NO_CLOCK)
settings.register_profile("search", max_examples=1000, **NO_CLOCK)
settings.load_profile("same")


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of the processes that `pytest -n` starts."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not is_worker(config):
        # Workers wait for the process that deals the tests out to them: it imports nothing that they need.
        return
    config.pluginmanager.import_plugin("shared_fixtures")
    # Not in setup.cfg: pytest would import hf_cgd, to find the class, before the environment above is set.
    config.addinivalue_line("filterwarnings", "error::hf_cgd.monitors.GroupRobustWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no worker is left with one when the others are done."""
    if is_worker(config):
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    # The end of every run collects garbage: not through all modules each time, which takes longer than the run.
    gc.collect()
    gc.freeze()
