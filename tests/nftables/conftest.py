"""Dataplanes in a network namespace of their own."""

import subprocess
from collections.abc import Callable, Iterator

import pytest

from rulecast_agent.dataplane.nftables.dataplane import NftablesDataplane


@pytest.fixture
def make(namespace: str) -> Iterator[Callable[..., NftablesDataplane]]:
    """Makes dataplanes inside the namespace and closes them."""
    made: list[NftablesDataplane] = []

    def build(**options: object) -> NftablesDataplane:
        made.append(NftablesDataplane(**options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for dataplane in made:
        dataplane.close()


def nft(*arguments: str) -> str:
    """Run nft in the current namespace."""
    return subprocess.run(["nft", *arguments], check=True, capture_output=True, text=True).stdout


def listing(family: str = "ip") -> str:
    return nft("list", "table", family, "rulecast")


Make = Callable[..., NftablesDataplane]
