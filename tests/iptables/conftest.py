"""Dataplanes of either backend in a network namespace of their own."""

import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import pytest

from rulecast.model import Family
from rulecast_agent.dataplane.iptables.dataplane import IptablesDataplane
from rulecast_agent.kernel.iptables import Backend, Iptables, IptablesRefused

Make = Callable[..., IptablesDataplane]


class KilledError(Exception):
    """Stands for the end of the process, which nothing catches."""


class Recording(Iptables):
    """Keeps what is written, and refuses what has a certain word in it."""

    written: ClassVar[list[str]]
    word = ""
    killed_after = -1
    """Sections until the process is gone; negative: it lives."""

    def restore(self, sections: Iterable[str]) -> None:
        """As iptables-restore: sections before the refused one hold."""
        for section in sections:
            if self.word and any(self.word in line for line in section.splitlines() if line[:2] == "-A"):
                raise IptablesRefused(f"refused: {self.word}")
            if len(self.written) == self.killed_after:
                raise KilledError
            super().restore([section])
            self.written.append(section)


@pytest.fixture(params=list(Backend))
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture
def kernel(backend: Backend, namespace: str) -> type[Recording]:
    """Shared by all that `make` makes."""
    return type("Recorded", (Recording,), {"written": [], "word": ""})


@pytest.fixture
def make(backend: Backend, kernel: type[Recording]) -> Iterator[Make]:
    """Makes dataplanes inside the namespace and closes them."""
    made: list[IptablesDataplane] = []

    def build(**options: object) -> IptablesDataplane:
        made.append(IptablesDataplane(backend=backend, make=kernel, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for dataplane in made:
        dataplane.close()


TOOLS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}


def iptables(backend: Backend, arguments: str, family: Family = Family.IPV4) -> None:
    """Run a command in the current namespace."""
    subprocess.run([f"{TOOLS[family]}-{backend}", *arguments.split()], check=True, capture_output=True)


def saved(backend: Backend) -> list[str]:
    """Both families' tables, without counters and times, in an order that does not depend on history."""
    lines = []
    for family, tool in TOOLS.items():
        for table in ("nat", "filter"):
            done = subprocess.run(
                [f"{tool}-{backend}-save", "-t", table], check=True, capture_output=True, text=True
            )
            rules = [line.split(" [")[0] for line in done.stdout.splitlines() if not line.startswith("#")]
            lines += sorted(f"{family} {table} {line}" for line in rules if line.startswith(":"))
            lines += sorted(
                (f"{family} {table} {line}" for line in rules if line.startswith("-A")),
                key=lambda line: line.split()[3],
            )
    return lines
