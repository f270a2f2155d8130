"""What the kernel refuses, and an nft that cannot be used."""

import pytest

from rulecast_agent.dataplane.base import DataplaneError
from rulecast_agent.kernel.nft import NftCommand, NftRefused
from tests.nftables.conftest import Make, listing
from tests.nftables.values import HOST, VIEWS, key, update, view

pytestmark = pytest.mark.netns


class Picky(NftCommand):
    """Refuses every script that names a word."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word
        self.runs = 0

    def run(self, script: str, *, check: bool = False) -> None:
        self.runs += 1
        if self.word and self.word in script:
            raise NftRefused(f"refused: {self.word}")
        super().run(script, check=check)


def test_one_refused_service_holds_back_no_other(make: Make) -> None:
    nft_command = Picky("bad-")
    dataplane = make(nft=nft_command)
    many = {
        key(f"n{i}"): view(key(f"n{i}"), i, affinity_seconds=9, cluster_ip=f"172.30.1.{i}") for i in range(60)
    }
    bad = key("bad-one")
    many[bad] = view(bad, 99, affinity_seconds=9, cluster_ip="172.30.2.1")
    receipt = dataplane.apply(update(many, full=True), HOST)
    assert list(receipt.errors) == [bad]
    assert "refused" in receipt.errors[bad]
    assert nft_command.runs < 40
    assert listing().count("goto affinity-cluster-ip") == 60
    assert dataplane.verify().count == 0
    again = dataplane.retry()
    assert again is not None
    assert list(again.errors) == [bad]
    nft_command.word = ""
    mended = dataplane.retry()
    assert mended is not None
    assert mended.errors == {}
    assert dataplane.retry() is None
    assert listing().count("goto affinity-cluster-ip") == 61


def test_a_refused_change_leaves_the_service_as_it_was(make: Make) -> None:
    nft_command = Picky("")
    dataplane = make(nft=nft_command)
    dataplane.apply(update(VIEWS, full=True), HOST)
    before = listing()
    nft_command.word = "cluster-ip-tcp-4"
    receipt = dataplane.apply(update({key(): view(key(), 1, 2, 3, 4, local=(1,), node_port=30080)}), HOST)
    assert list(receipt.errors) == [key()]
    assert listing() == before


def test_without_nft_the_error_is_one_clear_line(make: Make) -> None:
    dataplane = make(nft=NftCommand(command="nft-is-not-here"))
    with pytest.raises(DataplaneError, match="cannot run nft-is-not-here") as caught:
        dataplane.apply(update(VIEWS, full=True), HOST)
    assert "\n" not in str(caught.value)


def test_what_could_not_start_is_owed_to_the_next_retry(make: Make) -> None:
    nft_command = Picky("rulecast")
    dataplane = make(nft=nft_command)
    with pytest.raises(DataplaneError):
        dataplane.apply(update(VIEWS, full=True), HOST)
    nft_command.word = ""
    receipt = dataplane.retry()
    assert receipt is not None
    assert receipt.errors == {}
    assert dataplane.verify().count == 0
    assert "172.30.0.41" in listing()


def test_services_that_went_before_a_start_worked_are_not_programmed(make: Make) -> None:
    nft_command = Picky("rulecast")
    dataplane = make(nft=nft_command)
    with pytest.raises(DataplaneError):
        dataplane.apply(update(VIEWS, full=True), HOST)
    nft_command.word = ""
    dataplane.apply(update({}, full=True), HOST)
    assert "172.30.0.41" not in listing()
