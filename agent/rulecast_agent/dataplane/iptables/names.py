"""The names of our chains and lists. A chain's name has at most 28 characters (XT_EXTENSION_MAXNAMELEN)."""

import hashlib
from base64 import b32encode

from rulecast.model import Endpoint, Family, ServiceKey

PREFIX = "RULECAST-"

SERVICES = "RULECAST-SERVICES"
FRONTENDS = "RULECAST-FRONTENDS"
NODE_PORTS = "RULECAST-NODEPORTS"
POSTROUTING = "RULECAST-POSTROUTING"
HAIRPIN = "RULECAST-HAIRPIN"
INPUT = "RULECAST-INPUT"
FORWARD = "RULECAST-FORWARD"
OUTPUT = "RULECAST-OUTPUT"
UNDELIVERED = "RULECAST-UNDELIVERED"
PORTS = "RULECAST-PORTS"
CLUSTER_IPS = "RULECAST-CLUSTER-IPS"
REFUSE = "RULECAST-REFUSE"

WIDTH = {Family.IPV4: 32, Family.IPV6: 128}


def digest(*parts: str) -> str:
    """13 characters that stand for the parts."""
    hashed = hashlib.blake2s("\0".join(parts).encode(), digest_size=8).digest()
    return b32encode(hashed).decode().rstrip("=")


def service_chain(kind: str, key: ServiceKey) -> str:
    """A service port's own chain of a kind."""
    return f"{PREFIX}{kind}-{digest(key)}"


def recent_list(key: ServiceKey, endpoint: Endpoint) -> str:
    """The list of the clients that have this endpoint, of the `recent` match."""
    return f"{PREFIX}{digest(key, endpoint.ip, str(endpoint.port))}"


def dispatch_chain(code: str, prefix: int, length: int) -> str:
    """The chain of a dispatch tree for the keys that begin with the `length` bits of `prefix`.

    Readable where it can be: the bits in hexadecimal, filled up with zeros, and their number.
    """
    digits = f"{prefix << -length % 4:0{(length + 3) // 4}x}"
    return f"{PREFIX}{code}-{digits if len(digits) <= 13 else digest(digits)}-{length}"
