"""Which certificates are made when, over the years."""

import msgspec
import pytest

from rulecast_server.certs.pki import Pair, certificates
from rulecast_server.certs.plan import Held, Step, Terms, next_step
from tests.certs.authorities import PaperPki

TERMS = Terms(names=("rulecast-server.rulecast.svc", "localhost"))


class Years:
    """What is held, and one run of the plan a day."""

    def __init__(self) -> None:
        self.pki = PaperPki()
        self.held = Held()
        self.parts: list[str] = []

    def run(self, terms: Terms = TERMS) -> list[str]:
        """Until nothing is missing; the parts that were written."""
        parts: list[str] = []
        while (step := next_step(self.held, terms, self.pki)) is not None:
            assert len(parts) < 5, "it must come to an end"
            parts.append(self.write(step))
        return parts

    def write(self, step: Step) -> str:
        (part,) = (name for name in ("authority", "bundle", "server") if getattr(step, name) is not None)
        assert step.why
        self.held = msgspec.structs.replace(self.held, **{part: getattr(step, part)})
        return part

    def good_for(self, bundle: str) -> bool:
        """Whether an agent with this bundle trusts what the servers show."""
        return self.held.server is not None and self.pki.verifies(self.held.server.cert, bundle)


@pytest.fixture
def years() -> Years:
    years = Years()
    assert years.run() == ["authority", "bundle", "server"]
    return years


def test_a_second_run_changes_nothing(years: Years) -> None:
    assert years.run() == []
    assert years.good_for(years.held.bundle)


def test_a_run_that_was_cut_short_is_finished_by_the_next() -> None:
    for cut in range(3):
        years = Years()
        for _ in range(cut):
            step = next_step(years.held, TERMS, years.pki)
            assert step is not None
            years.write(step)
        assert len(years.run()) == 3 - cut
        assert (years.pki.authorities, years.pki.issued) == (1, 1)


def test_over_decades_an_agent_always_trusts_the_server_even_with_yesterdays_authorities(
    years: Years,
) -> None:
    yesterday = years.held.bundle
    for day in range(1, 30 * 365):
        years.pki.today = float(day)
        years.run()
        assert years.good_for(yesterday), day
        assert years.good_for(years.held.bundle), day
        assert len(certificates(years.held.bundle)) <= 2
        yesterday = years.held.bundle
    assert years.pki.authorities == 4
    assert years.pki.issued == pytest.approx(30 * 365 / 60, abs=2)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"server": None}, ["server"]),
        ({"server": Pair("garbage", "garbage")}, ["server"]),
        ({"bundle": ""}, ["bundle"]),
        ({"bundle": "garbage"}, ["bundle"]),
        # Nobody can sign any more, but what was signed goes on being good until it is due.
        ({"authority": None}, ["authority", "bundle"]),
        ({"authority": Pair("garbage", "garbage")}, ["authority", "bundle"]),
        ({"authority": None, "bundle": ""}, ["authority", "bundle", "server"]),
        ({"authority": None, "server": None}, ["authority", "bundle", "server"]),
    ],
)
def test_what_is_lost_is_made_again_and_no_more(years: Years, change: dict, parts: list[str]) -> None:
    years.held = msgspec.structs.replace(years.held, **change)
    assert years.run() == parts
    assert years.good_for(years.held.bundle)
    assert years.run() == []


def test_a_key_of_another_certificate_is_not_kept(years: Years) -> None:
    assert years.held.server is not None
    years.held = msgspec.structs.replace(years.held, server=Pair(years.held.server.cert, "key of another"))
    assert years.run() == ["server"]


def test_a_new_name_is_in_a_new_certificate_of_the_same_authority(years: Years) -> None:
    terms = msgspec.structs.replace(TERMS, names=(*TERMS.names, "rules.example"))
    assert years.run(terms) == ["server"]
    assert years.pki.authorities == 1


def test_after_years_of_rest_all_is_made_anew(years: Years) -> None:
    years.pki.today = 5000.0
    assert years.run() == ["authority", "bundle", "server"]
    assert years.good_for(years.held.bundle)
    assert len(certificates(years.held.bundle)) == 1
