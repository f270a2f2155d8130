"""A network namespace of its own for each kernel test."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from pyroute2 import netns


@pytest.fixture
def namespace() -> Iterator[str]:
    """A fresh namespace; the test runs inside it."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    name = f"rcagent{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    netns.pushns(name)
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        netns.popns()
        subprocess.run(["ip", "netns", "del", name], check=True)
