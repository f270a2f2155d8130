"""Sections for iptables-restore. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from rulecast_agent.dataplane.iptables.dispatch import Rules


def section(
    table: str,
    chains: Mapping[str, Rules],
    *,
    deletes: Iterable[str] = (),
    hooks: Iterable[tuple[str, str]] = (),
) -> str:
    """One transaction: chains get exactly these rules, hooks are put first, chains are deleted last."""
    gone = list(deletes)
    lines = [f"*{table}\n"]
    # A declaration empties a chain that is there, within the transaction.
    lines += [f":{name} - [0:0]\n" for name in (*chains, *gone)]
    lines += [f"-A {name} {rule}\n" for name, rules in chains.items() for rule in rules]
    lines += [f"-I {chain} {rule}\n" for chain, rule in hooks]
    lines += [f"-X {name}\n" for name in gone]
    lines.append("COMMIT\n")
    return "".join(lines)


def sections(table: str, chains: Mapping[str, Rules], *, limit: int) -> Iterator[str]:
    """Transactions of about `limit` rules, in the order of `chains`."""
    part: dict[str, Rules] = {}
    count = 0
    for name, rules in chains.items():
        part[name] = rules
        count += len(rules) + 1
        if count >= limit:
            yield section(table, part)
            part, count = {}, 0
    if part:
        yield section(table, part)


def deletions(table: str, chains: Iterable[str], *, limit: int) -> Iterator[str]:
    """Transactions that delete chains, in their order."""
    left = list(chains)
    for at in range(0, len(left), limit):
        yield section(table, {}, deletes=left[at : at + limit])
