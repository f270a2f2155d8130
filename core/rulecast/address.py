"""Canonical text of IP addresses and CIDRs.

Equal addresses must be equal text on every replica and every node, because keys and digests are made of it.
What is accepted follows kube-proxy's "sloppy" parsers (k8s.io/utils/net ParseIPSloppy and ParseCIDRSloppy):
octets with leading zeros are decimal, and an IPv4-mapped IPv6 address is the IPv4 address.
"""

import ipaddress
import re
import socket

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_CANONICAL_IPV4 = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}", re.ASCII)
_LEADING_ZEROS = re.compile(r"(?<![0-9A-Fa-f])0+(?=[0-9A-Fa-f])")
_MAPPED = b"\0" * 10 + b"\xff\xff"
_LONGEST = 100
"""No address or CIDR is longer, even with padding that anyone would write; what is, is not looked at."""


class AddressError(ValueError):
    """Not an IP address or CIDR; `str()` names the text."""


def canonical_ip(text: str) -> str:
    """Render an IP address canonically: dotted decimal, or RFC 5952 for IPv6.

    Leading zeros, upper case and IPv4-mapped forms are normalized. Raises AddressError for anything else,
    zone identifiers and surrounding space included.
    """
    if _CANONICAL_IPV4.fullmatch(text):
        return text
    packed = _pack(text)
    return _render(packed)


def canonical_cidr(text: str) -> str:
    """Render a CIDR canonically, with the host bits cleared; surrounding space is allowed.

    An IPv4-mapped prefix of 96 bits or more becomes the IPv4 prefix, as Go's IPNet prints it. Raises
    AddressError, also when there is no prefix length.
    """
    address, slash, length_text = text.strip().partition("/")
    if not slash or not length_text.isascii() or not length_text.isdigit() or len(length_text) > _LONGEST:
        raise AddressError(f"not a CIDR: {_quote(text)}")
    try:
        packed = _pack(address)
    except AddressError:
        raise AddressError(f"not a CIDR: {_quote(text)}") from None
    mapped_text = len(packed) == 4 and ":" in address
    length = int(length_text)
    if mapped_text:
        if length < 96:
            packed = _MAPPED + packed
        else:
            length -= 96
    bits = 8 * len(packed)
    if length > bits:
        raise AddressError(f"not a CIDR: {_quote(text)}")
    host_bits = bits - length
    network = int.from_bytes(packed) >> host_bits << host_bits
    return f"{_render(network.to_bytes(len(packed)))}/{length}"


def is_ipv6(canonical: str) -> bool:
    """Tell the family of a canonical address or CIDR."""
    return ":" in canonical


def is_unspecified(canonical: str) -> bool:
    """Whether a canonical address is 0.0.0.0 or ::, which no service or endpoint can have."""
    return canonical in ("0.0.0.0", "::")  # noqa: S104  (compared, not bound)


def _pack(text: str) -> bytes:
    """4 or 16 bytes; IPv4-mapped addresses give 4."""
    if len(text) <= _LONGEST and text.isascii():
        try:
            if ":" not in text:
                return _pack_ipv4(text)
            return _unmap(socket.inet_pton(socket.AF_INET6, _unpad(text)))
        except (OSError, ValueError):
            pass
    raise AddressError(f"not an IP address: {_quote(text)}")


def _pack_ipv4(text: str) -> bytes:
    octets = text.split(".")
    if len(octets) != 4 or not all(octet.isdigit() for octet in octets):
        raise ValueError(text)
    return bytes(map(int, octets))


def _unpad(text: str) -> str:
    """Cut leading zeros, which inet_pton refuses in an IPv4 tail and beyond four digits."""
    if "0" not in text or "\0" in text:
        return text
    return _LEADING_ZEROS.sub("", text)


def _unmap(packed: bytes) -> bytes:
    return packed[12:] if packed.startswith(_MAPPED) else packed


def _render(packed: bytes) -> str:
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed)
    text = socket.inet_ntop(socket.AF_INET6, packed)
    # Some C libraries print the last 32 bits of ::/96 as an IPv4 address; RFC 5952 and Go do not.
    return ipaddress.IPv6Address(packed).compressed if "." in text else text


def _quote(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "...")
