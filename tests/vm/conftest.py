"""Skipped, with the reason, only where no virtual machine can run; REQUIRE=vm makes that a failure."""

import os

import pytest

from tests.vm import machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here takes a virtual machine."""
    for item in items:
        if item.path.parent.name == "vm":
            item.add_marker(pytest.mark.vm)


@pytest.fixture(scope="session")
def booted() -> None:
    """A machine boots and runs commands."""
    try:
        result = machine.run("exit 7", timeout=60)
        if result.code != 7:
            raise machine.Unavailable(f"the virtual machine does not boot: {result.output[-500:]}")
    except machine.Unavailable as error:
        if "vm" in os.environ.get("REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))
