"""Rule text, in exactly the words of iptables-save, so that a read-back compares as text.

Keys of dispatch trees are integers: address, protocol (4 bits) and port (16 bits), as far as a tree has them.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address

from rulecast.model import Endpoint, Family, Protocol
from rulecast_agent.dataplane.base import LocalDetector
from rulecast_agent.dataplane.iptables import names

_PROTOCOLS = (Protocol.TCP, Protocol.UDP, Protocol.SCTP)
_PORT_BITS = 16
SERVICE_BITS = 4 + _PORT_BITS
"""Bits of protocol and port."""
NEW = "-m conntrack --ctstate NEW"
LOCAL_SOURCE = "-m addrtype --src-type LOCAL"
LOCAL_DESTINATION = "-m addrtype --dst-type LOCAL"


def service_key(protocol: Protocol, port: int, address: str = "") -> int:
    """The key of an address (or of a node port, without one), protocol and port."""
    place = _PROTOCOLS.index(protocol) << _PORT_BITS | port
    return int(ip_address(address)) << SERVICE_BITS | place if address else place


def frontend_match(family: Family, prefix: int, length: int) -> str:
    """Destinations of the frontends whose key begins with `prefix`."""
    width = names.WIDTH[family]
    if length <= width:
        return f"-d {_cidr(family, prefix, length)}"
    rest = length - width
    return f"-d {_cidr(family, prefix >> rest, width)} {port_match(prefix & (1 << rest) - 1, rest)}"


def port_match(prefix: int, length: int) -> str:
    """A protocol (4 bits), or one with a range of ports."""
    known = length - 4
    protocol = _PROTOCOLS[prefix >> known].lower()
    if not known:
        return f"-p {protocol}"
    free = _PORT_BITS - known
    low = (prefix & (1 << known) - 1) << free
    ports = f"{low}:{low + (1 << free) - 1}" if free else f"{low}"
    return f"-p {protocol} -m {protocol} --dport {ports}"


def address_match(family: Family, prefix: int, length: int) -> str:
    """Destinations that begin with `prefix`."""
    return f"-d {_cidr(family, prefix, length)}"


def hairpin_match(family: Family, prefix: int, length: int) -> str:
    """Sources that begin with `prefix`; a whole address also as destination: who reached itself."""
    text = f"-s {_cidr(family, prefix, length)}"
    return f"{text} -d {_cidr(family, prefix, length)}" if length == names.WIDTH[family] else text


def host(address: str) -> str:
    """An address as iptables-save has it."""
    return f"{address}/{128 if ':' in address else 32}"


def from_elsewhere(detector: LocalDetector) -> str:
    """Not sent by a pod of ours; "" without a detector."""
    return _source(detector, "! ")


def from_our_pod(detector: LocalDetector) -> str:
    """Sent by a pod of ours; "" without a detector."""
    return _source(detector, "")


def random_share(left: int) -> str:
    """One of `left`, by the kernel's 31-bit random number. Never needed for the last one."""
    parts = 1 << 31
    return f"-m statistic --mode random --probability {round(parts / left) / parts:.11f}"


def share(part: int, whole: int) -> str:
    """`part` of `whole` in the same way."""
    parts = 1 << 31
    return f"-m statistic --mode random --probability {round(parts * part / whole) / parts:.11f}"


def translate(endpoint: Endpoint) -> str:
    """To an endpoint; the rule must name the protocol."""
    ip = f"[{endpoint.ip}]" if ":" in endpoint.ip else endpoint.ip
    return f"-j DNAT --to-destination {ip}:{endpoint.port}"


def set_mark(bit: int) -> str:
    """Set our bit and leave the others."""
    return f"-j MARK --set-xmark {bit:#x}/{bit:#x}"


def flip_mark(bit: int) -> str:
    """Clear our bit where it is set."""
    return f"-j MARK --set-xmark {bit:#x}/0x0"


def marked(bit: int) -> str:
    """Has our bit."""
    return f"-m mark --mark {bit:#x}/{bit:#x}"


def unmarked(bit: int) -> str:
    """Does not have our bit."""
    return f"-m mark ! --mark {bit:#x}/{bit:#x}"


def refusals(family: Family, protocol: Protocol | None = None) -> str:
    """The target that refuses: a reset for TCP, else an ICMP error."""
    if protocol is Protocol.TCP:
        return "-j REJECT --reject-with tcp-reset"
    return f"-j REJECT --reject-with icmp{'6' if family is Family.IPV6 else ''}-port-unreachable"


def remembered(name: str, seconds: int, family: Family) -> str:
    """A client that is in a list and was seen within so many seconds; refreshes it."""
    return f"-m recent --update --seconds {seconds} --reap --name {name} {_mask(family)} --rsource"


def remember(name: str, family: Family) -> str:
    """Put the client into a list."""
    return f"-m recent --set --name {name} {_mask(family)} --rsource"


def comment(text: str) -> str:
    """A comment; services' names need quotes for the slash."""
    return f'-m comment --comment "{text}"'


def _source(detector: LocalDetector, negation: str) -> str:
    if detector.source_cidr:
        return f"{negation}-s {detector.source_cidr}"
    if detector.interface:
        return f"{negation}-i {detector.interface}"
    if detector.interface_prefix:
        return f"{negation}-i {detector.interface_prefix}+"
    return ""


def _mask(family: Family) -> str:
    mask = "255.255.255.255" if family is Family.IPV4 else "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    return f"--mask {mask}"


def _cidr(family: Family, prefix: int, length: int) -> str:
    width = names.WIDTH[family]
    value = prefix << (width - length)
    return f"{IPv4Address(value) if family is Family.IPV4 else IPv6Address(value)}/{length}"
