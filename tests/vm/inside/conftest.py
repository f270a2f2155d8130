"""The lab of the packet tests, for tests inside the virtual machine. Outside, no file here is collected."""

from collections.abc import Iterator

import pytest

from tests.netns.conftest import fault_rig
from tests.netns.rig import Rig
from tests.vm.inside.table import empty

__all__ = ["fault_rig", "rig"]


def _reset(rig: Rig) -> None:
    rig.reset()
    for node in (rig.n1, rig.n2):
        empty(node)


@pytest.fixture(scope="class")
def rig(fault_rig: Rig) -> Iterator[Rig]:
    """Nothing runs yet, and nothing is in the kernels; the same for all tests of a class."""
    _reset(fault_rig)
    yield fault_rig
    _reset(fault_rig)
