"""Tests marked `netns` are skipped, with the reason, only where the kernel cannot run them."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from pyroute2 import netns

from rulecast.lab import unavailable


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """REQUIRE=netns (or netns,vm) turns the skips into failures: for machines that are known to be able."""
    reason = unavailable()
    if not reason or "netns" in os.environ.get("REQUIRE", "").split(","):
        return
    for item in items:
        if item.get_closest_marker("netns"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def namespace() -> Iterator[str]:
    """A fresh network namespace; the test runs inside it."""
    name = f"rctest{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    netns.pushns(name)
    try:
        yield name
    finally:
        netns.popns()
        subprocess.run(["ip", "netns", "del", name], check=True)
