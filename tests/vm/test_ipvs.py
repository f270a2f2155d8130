"""IPVS mode, in a kernel that has it: the tables of every mode, and what only IPVS does."""

import pytest

from tests.vm import machine

INSIDE = {
    "the table of semantics": ["tests/netns/test_semantics.py"],
    "the other tables of all modes": [
        f"tests/netns/test_{name}.py" for name in ("variants", "changes", "flows", "odd_packets")
    ],
    "what only IPVS does": ["tests/vm/inside/ipvs.py"],
}


# The first may have to wait for its kernel to be built.
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("files", INSIDE.values(), ids=INSIDE)
def test_ipvs_mode(booted: None, files: list[str]) -> None:
    command = " ".join([".venv/bin/python -m pytest -q -p no:cacheprovider --durations=5", *files])
    result = machine.run(
        command, timeout=840, environment={"MODE": "ipvs", "REQUIRE": "netns", "SLOWNESS": "3"}
    )
    assert result.code == 0, result.output[-20000:]
    assert " passed" in result.output
