"""What the kernel refuses, and an iptables that cannot be used."""

import pytest

from rulecast.model import ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import DataplaneError
from rulecast_agent.dataplane.iptables.dataplane import IptablesDataplane
from rulecast_agent.kernel.iptables import Backend, Iptables
from tests.iptables.conftest import Make, Recording, iptables, saved
from tests.iptables.test_program import many
from tests.nftables.values import HOST, VIEWS, key, update, view

pytestmark = pytest.mark.netns
BAD = key("bad")
ONE_BAD: dict[ServiceKey, ServiceView] = {BAD: view(BAD, 99, cluster_ip="172.30.8.1", node_port=30999)}


@pytest.mark.parametrize("others", [10, 400], ids=["a few", "many"])
def test_one_refused_service_holds_back_no_other(make: Make, kernel: type[Recording], others: int) -> None:
    kernel.word = "ns/bad"
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    receipt = dataplane.apply(update(many(others, 1, 2) | ONE_BAD), HOST)
    assert receipt.errors == {BAD: "refused: ns/bad"}
    assert dataplane.verify().count == 0
    again = dataplane.retry()
    assert again is not None
    assert list(again.errors) == [BAD]
    kernel.word = ""
    mended = dataplane.retry()
    assert mended is not None
    assert mended.errors == {}
    assert dataplane.retry() is None
    assert dataplane.verify().count == 0


@pytest.mark.parametrize("word", ["ns/bad", "172.30.8.1"], ids=["in its chains", "in the dispatch"])
def test_one_refused_service_does_not_stop_the_first_load(
    make: Make, kernel: type[Recording], backend: Backend, word: str
) -> None:
    make().apply(update(VIEWS | many(100, 1, 2), full=True), HOST)
    without = saved(backend)
    make().cleanup()
    kernel.word = word
    dataplane = make()
    receipt = dataplane.apply(update(VIEWS | many(100, 1, 2) | ONE_BAD, full=True), HOST)
    assert list(receipt.errors) == [BAD]
    assert saved(backend) == without
    assert dataplane.verify().count == 0


@pytest.mark.parametrize("others", [0, 10, 400], ids=["alone", "among a few", "among many"])
@pytest.mark.parametrize("word", ["10.180.0.77", "172.30.7.7"], ids=["in its chains", "in the dispatch"])
def test_a_refused_change_leaves_the_service_as_it_was(
    make: Make, kernel: type[Recording], backend: Backend, word: str, others: int
) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS | many(others, 1), full=True), HOST)
    before = saved(backend)
    kernel.word = word
    change = {key(): view(key(), 1, 2, 77, local=(1,), node_port=30090, external_ips=("172.30.7.7",))}
    receipt = dataplane.apply(update(change), HOST)
    assert list(receipt.errors) == [key()]
    assert saved(backend) == before
    receipt = dataplane.apply(update(many(others, 1, 2)), HOST)
    assert list(receipt.errors) == [key()]
    assert dataplane.verify().count == 0


def test_a_kernel_that_does_not_hold_what_we_left_is_not_the_services_fault(
    make: Make, backend: Backend
) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    for table in ("nat", "filter"):
        for command in ("-F", "-X"):
            iptables(backend, f"-t {table} {command}")
    receipt = dataplane.apply(update(many(40, 1, 2)), HOST)
    assert receipt.errors == {}
    dataplane.check()
    assert dataplane.verify().count == 0


class Missing(Iptables):
    """Has no program."""

    def _command(self, action: str) -> str:
        return f"iptables-is-not-here-{action}"


def test_without_iptables_the_error_is_one_clear_line(namespace: str) -> None:
    dataplane = IptablesDataplane(backend=Backend.NFT, make=Missing)
    with pytest.raises(DataplaneError, match="cannot run iptables-is-not-here") as caught:
        dataplane.apply(update(VIEWS, full=True), HOST)
    assert "\n" not in str(caught.value)


def test_what_could_not_start_is_owed_to_the_next_apply(make: Make, kernel: type[Recording]) -> None:
    kernel.word = "RULECAST"
    dataplane = make()
    with pytest.raises(DataplaneError):
        dataplane.apply(update(VIEWS, full=True), HOST)
    kernel.word = ""
    assert dataplane.retry() is not None
    assert dataplane.verify().count == 0
