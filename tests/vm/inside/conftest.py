"""The lab of the packet tests, for tests inside the virtual machine. Outside, no file here is collected."""

from tests.netns.conftest import fault_rig, rig

__all__ = ["fault_rig", "rig"]
