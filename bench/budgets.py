"""What is promised, and whether a run kept it."""

from collections.abc import Mapping
from typing import NamedTuple


class Budget(NamedTuple):
    """An upper limit of one row, in the row's own unit."""

    part: str
    column: str
    row: str
    limit: float


BUDGETS = (
    Budget("wire", "10000 x 10", "snapshot, zstd B", 1e6),
    Budget("kernel", "nftables 10000", "cold load", 500.0),
    Budget("kernel", "iptables-nft 10000", "cold load", 5000.0),
    Budget("kernel", "iptables-nft 10000", "one endpoint replaced", 50.0),
    Budget("kernel", "ipvs 10000", "cold load", 2000.0),
    Budget("kernel", "ipvs 10000", "one endpoint replaced", 10.0),
    Budget("line", "nftables 10000", "agent spawn to answering", 3000.0),
    Budget("line", "nftables 10000", "change p50", 20.0),
    Budget("line", "nftables 10000", "agent CPU a change", 5.0),
    Budget("line", "nftables 10000", "agent peak MB", 120.0),
    Budget("line", "iptables-nft 10000", "agent peak MB", 120.0),
    *(
        Budget("line", f"{mode} {size}", "connect p50 us, ratio to 100", 1.3)
        for mode in ("nftables", "iptables-nft", "iptables-legacy", "ipvs")
        for size in (10_000, 50_000)
    ),
    Budget("fanout", "200 agents", "latency p50", 20.0),
    Budget("fanout", "200 agents", "latency p99", 60.0),
    Budget("fanout", "1000 agents", "latency p50", 60.0),
    Budget("fanout", "1000 agents", "latency p99", 300.0),
    Budget("fanout", "1000 agents", "server CPU us an update an agent", 10.0),
    Budget("fanout", "1000 agents", "bytes an update an agent", 150.0),
    Budget("fanout", "1000 agents", "all in sync", 5000.0),
    Budget("fanout", "1000 agents", "peak / steady", 1.5),
    Budget("fanout", "1000 agents", "server MB", 300.0),
    Budget("fanout", "1000 agents", "reconnect B, nothing changed", 5000.0),
    Budget("fanout", "200 agents", "server cores", 0.33),
)


def lines(part: str, columns: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each budget that these columns of a part can be held to."""
    found = []
    for budget in BUDGETS:
        measured = columns.get(budget.column, {}).get(budget.row)
        if budget.part == part and measured is not None:
            verdict = "ok" if measured <= budget.limit else "OVER"
            found.append(
                f"{verdict:>5}  {budget.column}: {budget.row} {measured:,.2f}, budget {budget.limit:,.0f}"
                if budget.limit >= 2
                else f"{verdict:>5}  {budget.column}: {budget.row} {measured:.2f}, budget {budget.limit}"
            )
    return found
