"""Nodes, pods and outside hosts on one fabric, in IPv4 and IPv6 from documentation ranges.

    n1  192.0.2.11  2001:db8:2::11  (second address 192.0.3.11, 2001:db8:3::11)  pods 10.244.1.0/24 and so on
    outside  198.51.100.7  2001:db8:51::7        lb  192.0.2.2  2001:db8:2::2

All hang on one bridge. The bridge's own namespace is everybody's default gateway and forwards nothing: what
leaves a node untranslated is lost there without an answer, as in a network that does not know the address.
"""

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import IO, Self

from rulecast.lab.echo import EchoServers
from rulecast.lab.netns import LabError, Namespace, delete, ip_batch, owned, owner_prefix, reclaim
from rulecast.model import Family, Protocol

_GATEWAY = {Family.IPV4: "192.0.2.1", Family.IPV6: "2001:db8:2::1"}
_FABRIC = {Family.IPV4: "192.0.2.0/24", Family.IPV6: "2001:db8:2::/64"}
_OUTSIDE = {Family.IPV4: "198.51.100.0/24", Family.IPV6: "2001:db8:51::/64"}
_POD_GATEWAY = {Family.IPV4: "169.254.1.1", Family.IPV6: "fe80::1"}
_PREFIX_LENGTH = {Family.IPV4: 24, Family.IPV6: 64}
_FAMILIES = (Family.IPV4, Family.IPV6)
_labs = itertools.count(1)

# Duplicate address detection would keep IPv6 silent for a second, and redirects would teach a host a way
# around the node under test. Two limits on ICMP errors would turn refusals into silence.
_SYSCTLS: dict[str, str | int] = {
    "ipv4__conf__all__rp_filter": 0,
    "ipv4__conf__default__rp_filter": 0,
    "ipv4__conf__all__accept_redirects": 0,
    "ipv4__conf__default__accept_redirects": 0,
    "ipv4__conf__all__send_redirects": 0,
    "ipv4__conf__default__send_redirects": 0,
    "ipv4__icmp_ratelimit": 0,
    "ipv4__icmp_ratemask": 0,
    "ipv6__conf__all__accept_dad": 0,
    "ipv6__conf__default__accept_dad": 0,
    "ipv6__conf__all__accept_redirects": 0,
    "ipv6__conf__default__accept_redirects": 0,
    "ipv6__conf__default__accept_ra": 0,
    "ipv6__icmp__ratelimit": 0,
}
_FORWARDING: dict[str, str | int] = {"ipv4__ip_forward": 1, "ipv6__conf__all__forwarding": 1}


class Host:
    """One machine of the lab: a namespace with addresses, backends and clients."""

    def __init__(self, lab: "Lab", name: str, addresses: dict[Family, str]) -> None:
        self.lab = lab
        self.name = name
        self.addresses: dict[Family, list[str]] = {family: [text] for family, text in addresses.items()}
        """The first of each family is the host's main one."""
        self.namespace = lab.make_namespace(name)

    def ip(self, family: Family = Family.IPV4) -> str:
        """The main address of a family."""
        return self.addresses[family][0]

    def add_address(self, address: str) -> None:
        """Give the host one more address (a VIP that it serves, another client); never a default source."""
        family = _family_of(address)
        # A deprecated IPv6 address is used when bound explicitly and never chosen by itself.
        lifetime = "nodad preferred_lft 0" if family is Family.IPV6 else ""
        self.namespace.ip(f"addr add {address}/{_host_bits(family)} dev eth0 {lifetime}")
        self.addresses[family].append(address)

    def serve(self, *ports: int, protocols: Iterable[Protocol] = (Protocol.TCP, Protocol.UDP)) -> None:
        """Answer on these ports of every address that the host has now."""
        addresses = [text for texts in self.addresses.values() for text in texts]
        for port, protocol in itertools.product(ports, list(protocols)):
            self.lab.servers.listen(self.name, self.namespace, addresses, port, protocol)

    def route(self, destination: str, via: "Host | None") -> None:
        """Send what goes to an address or CIDR through another host of the fabric; None: as by default."""
        family = _family_of(destination)
        if via is None:
            self.namespace.ip(f"route del {destination}")
        else:
            self.namespace.ip(f"route replace {destination} via {via.ip(family)}")


class Pod(Host):
    """A pod: one address of each family, its only way out through its node."""

    def __init__(self, node: "Node", name: str, number: int) -> None:
        super().__init__(node.lab, name, {family: node.pod_address(family, number) for family in _FAMILIES})
        self.node = node
        self.interface = f"veth-{name}"[:15]
        """The node's end of the pod's link."""
        inside, outside = (
            [],
            [f"link add {self.interface} type veth peer name eth0 netns {self.namespace.name}"],
        )
        outside.append(f"link set {self.interface} addrgenmode none up")
        inside.append("link set eth0 up")
        for family in _FAMILIES:
            gateway, address, bits = _POD_GATEWAY[family], self.ip(family), _host_bits(family)
            nodad = "nodad" if family is Family.IPV6 else ""
            # Link scope: masquerading must not choose the gateway's address as the node's.
            outside.append(f"addr add {gateway}/{bits} dev {self.interface} scope link {nodad}")
            outside.append(f"route add {address} dev {self.interface} src {node.ip(family)}")
            inside.append(f"addr add {address}/{bits} dev eth0 {nodad}")
            inside.append(f"route add {gateway} dev eth0")
            inside.append(f"route add default via {gateway} dev eth0")
        node.namespace.ip(*outside)
        self.namespace.ip(*inside)

    def remove(self) -> None:
        """Take the pod away at once, as when its machine dies: nobody is told."""
        self.lab.servers.close(self.name)
        self.node.pods.pop(self.name)
        self.lab.drop_namespace(self.name)
        # The namespace dies in the background, its end of the link with it; the address may be reused now.
        with contextlib.suppress(LabError):
            self.node.namespace.ip(f"link del {self.interface}")


class Node(Host):
    """A node: forwards between its pods and the fabric."""

    def __init__(self, lab: "Lab", name: str, number: int, zone: str) -> None:
        host = 10 + number
        super().__init__(lab, name, {Family.IPV4: f"192.0.2.{host}", Family.IPV6: f"2001:db8:2::{host}"})
        self.zone = zone
        self.number = number
        self.pod_cidrs = {Family.IPV4: f"10.244.{number}.0/24", Family.IPV6: f"2001:db8:244:{number}::/64"}
        self.second = {Family.IPV4: f"192.0.3.{host}", Family.IPV6: f"2001:db8:3::{host}"}
        """Addresses that the node has and its Node object does not name."""
        self.pods: dict[str, Pod] = {}
        self.namespace.sysctl(**_FORWARDING)

    def add_pod(self, name: str, number: int | None = None) -> Pod:
        """Add a pod; `number` is the last part of its addresses (the next free one from 5 on if None)."""
        used = {int(pod.ip().rpartition(".")[2]) for pod in self.pods.values()}
        if number is None:
            number = next(each for each in itertools.count(5) if each not in used)
        pod = Pod(self, name, number)
        self.pods[name] = pod
        return pod

    def pod_address(self, family: Family, number: int) -> str:
        """The address of the node's pod of that number."""
        return self.pod_cidrs[family].replace("0/24" if family is Family.IPV4 else "/64", str(number))


class Lab:
    """All namespaces of one small cluster; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        """Build the fabric, the outside client and the load balancer. Raises LabError."""
        reclaim()
        self._prefix = f"{owner_prefix()}{next(_labs)}-"
        self._namespaces: dict[str, Namespace] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.servers = EchoServers()
        self.nodes: dict[str, Node] = {}
        self.hosts: list[Host] = []
        """All that hang on the fabric, nodes included."""
        atexit.register(self.close)
        try:
            self.fabric = Host(self, "fabric", _GATEWAY)
            """The bridge's namespace: reachable from all nodes and outside hosts, never through a Service."""
            self.fabric.namespace.ip(
                "link add eth0 type bridge forward_delay 0 mcast_snooping 0",
                *(f"addr add {text}/{_PREFIX_LENGTH[family]} dev eth0" for family, text in _GATEWAY.items()),
                "link set eth0 up",
                *(f"route add {cidr} dev eth0" for family, cidr in _OUTSIDE.items()),
            )
            self.outside = self.add_host(
                "outside", {Family.IPV4: "198.51.100.7", Family.IPV6: "2001:db8:51::7"}
            )
            """A client that is neither node nor pod."""
            self.lb = self.add_host("lb", {Family.IPV4: "192.0.2.2", Family.IPV6: "2001:db8:2::2"})
            """A load balancer of its own: give it addresses and ports, and count what really comes to it."""
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_host(self, name: str, addresses: dict[Family, str]) -> Host:
        """Add a machine to the fabric that is no node."""
        host = Host(self, name, addresses)
        self._plug(host, [])
        return host

    def add_node(self, name: str, zone: str = "") -> Node:
        """Add a node; everybody on the fabric learns the way to its pods and to its second addresses."""
        node = Node(self, name, len(self.nodes) + 1, zone)
        self._plug(node, list(node.second.values()))
        for other in self.hosts:
            if other is not node:
                other.namespace.ip(*_routes_to(node))
        self.nodes[name] = node
        return node

    def popen(
        self, host: Host, argv: Sequence[str], *, stdout: IO[bytes] | int, stderr: IO[bytes] | int
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host; it is ended with the lab."""
        process = host.namespace.popen(argv, stdout=stdout, stderr=stderr)
        self._processes.append(process)
        return process

    def make_namespace(self, name: str) -> Namespace:
        """A namespace of this lab, with its loopback up. Raises LabError when the name is taken."""
        ip_batch([f"netns add {self._prefix}{name}"])
        namespace = Namespace(self._prefix + name)
        self._namespaces[name] = namespace
        namespace.sysctl(**_SYSCTLS)
        namespace.ip("link set lo up")
        return namespace

    def drop_namespace(self, name: str) -> None:
        """Delete one namespace."""
        namespace = self._namespaces.pop(name)
        namespace.close()
        delete([namespace.name])

    def close(self) -> None:
        """End the processes and delete the namespaces. May be called again, and at any point of building."""
        _end(self._processes)
        self._processes.clear()
        self.servers.stop()
        for namespace in self._namespaces.values():
            namespace.close()
        # By name: one that an interrupt kept from being registered is ours too.
        delete(owned(self._prefix))
        self._namespaces.clear()
        # Last, so that a close which was interrupted is done again at exit.
        atexit.unregister(self.close)

    def _plug(self, host: Host, second: Sequence[str]) -> None:
        self.fabric.namespace.ip(
            f"link add {host.name} type veth peer name eth0 netns {host.namespace.name}",
            f"link set {host.name} master eth0 up",
        )
        commands = ["link set eth0 up"]
        for family in _FAMILIES:
            nodad = "nodad" if family is Family.IPV6 else ""
            commands.append(f"addr add {host.ip(family)}/{_host_bits(family)} dev eth0 {nodad}")
            commands += [
                f"route replace {cidr} dev eth0 src {host.ip(family)}"
                for cidr in (_FABRIC[family], _OUTSIDE[family])
            ]
            commands.append(f"route add default via {_GATEWAY[family]} dev eth0 src {host.ip(family)}")
        for node in self.nodes.values():
            commands += _routes_to(node)
        host.namespace.ip(*commands)
        for address in second:
            host.add_address(address)
        self.hosts.append(host)


def _routes_to(node: Node) -> list[str]:
    return [
        f"route add {destination} via {node.ip(family)}"
        for family in _FAMILIES
        for destination in (node.pod_cidrs[family], node.second[family])
    ]


def _family_of(text: str) -> Family:
    return Family.IPV6 if ":" in text else Family.IPV4


def _host_bits(family: Family) -> int:
    return 128 if family is Family.IPV6 else 32


def _end(processes: Sequence[subprocess.Popen[bytes]], patience: float = 3.0) -> None:
    """Terminate process groups; kill those that do not go."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
