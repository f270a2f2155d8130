"""Differences with what they are about: the service as it was and as it is."""

from collections.abc import Iterator, Sequence

from tests.conformance.compare import Difference
from tests.conformance.generate import Scenario
from tests.conformance.wanted import Endpoint, Wanted


def explained(scenario: Scenario, step: int, found: Sequence[Difference]) -> Iterator[str]:
    """Lines for a reader."""
    for number in sorted({each.case.service for each in found}):
        yield from (str(each) for each in found if each.case.service == number)
        for index, state in enumerate(scenario.states[:step], 1):
            services = {each.number: each for each in state.services}
            lines = list(_lines(services[number])) if number in services else ["none"]
            zones = " ".join(f"{node}={zone or '-'}" for node, zone in state.zones)
            hurried = ", not waited for" if state.hurried else ""
            yield f"  step {index} ({zones}{hurried}):"
            yield from (f"    {line}" for line in lines)


def _lines(service: Wanted) -> Iterator[str]:
    families = "+".join(f"v{int(family)}" for family in service.families)
    said = {
        "external IPs": service.external,
        "external": service.external_policy,
        "internal": service.internal_policy,
        "affinity": service.affinity,
        "ranges": " ".join(service.ranges),
        "ingress": " ".join(f"{what}/{mode}" for mode, what in service.ingress),
        "labels": service.labels,
        "incarnation": service.incarnation,
        "shared": service.shared,
        "odd": service.odd,
        "odd ingress": service.odd_ingress,
        "written": service.written,
        "no node ports": not service.node_ports,
    }
    yield f"{service.type} {families} " + "; ".join(f"{name}: {what}" for name, what in said.items() if what)
    for port in service.ports:
        yield f"{port.name or '-'}: {port.port}/{port.protocol} to {port.target}, nodePort {port.node_port}"
    for each in service.slices:
        ports = " ".join(f"{name or '-'}={port}/{protocol}" for name, port, protocol in each.ports)
        endpoints = ", ".join(map(_endpoint, each.endpoints))
        yield f"slice {each.number} v{int(each.family)} [{ports}]: {endpoints or 'empty'}"


def _endpoint(endpoint: Endpoint) -> str:
    hints = "".join(f" {each}" for each in (*endpoint.zones, *endpoint.nodes))
    where = "" if endpoint.said_where else " (no nodeName)"
    where += f" written {endpoint.written}" if endpoint.written else ""
    return f"{endpoint.who} {endpoint.state}{where}" + (f" hints{hints}" if hints else "")
