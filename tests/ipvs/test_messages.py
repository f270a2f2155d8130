"""What goes to the kernel and comes from it, against pyroute2's descriptions of the same messages."""

from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.generic.ipvs import ipvsmsg

from rulecast.model import Endpoint, Family
from rulecast_agent.kernel import ipvs
from rulecast_agent.kernel.ipvs import Destination, Scheduling, Timeouts, VirtualServer
from rulecast_agent.kernel.netlink_batch import Request

WEB = VirtualServer(Family.IPV4, 6, "172.30.0.41", 80)
WEB6 = VirtualServer(Family.IPV6, 6, "fd00:30::41", 443)
MARKED = VirtualServer(Family.IPV6, 0, "", 0, 0x30C57)


@pytest.fixture
def requests() -> ipvs.Ipvs:
    """Only makes messages: this kernel may have no IPVS."""
    made = ipvs.Ipvs.__new__(ipvs.Ipvs)
    made._family = 0x22
    return made


def decoded(request: Request) -> Any:
    header = (16 + len(request.body)).to_bytes(4, "little") + b"\x22\0\x05\0" + bytes(8)
    message = ipvsmsg(header + request.body)
    message.decode()
    return message


def service(message: Any) -> dict[str, Any]:
    return dict(message.get_attr("IPVS_CMD_ATTR_SERVICE")["attrs"])


def destination(message: Any) -> dict[str, Any]:
    return dict(message.get_attr("IPVS_CMD_ATTR_DEST")["attrs"])


@pytest.mark.parametrize("server", [WEB, WEB6], ids=["ipv4", "ipv6"])
def test_a_virtual_server_of_an_address(requests: ipvs.Ipvs, server: VirtualServer) -> None:
    message = decoded(requests.add(server, Scheduling("wlc")))
    assert message["cmd"] == 1
    parts = service(message)
    assert parts["IPVS_SVC_ATTR_PROTOCOL"] == 6
    assert parts["IPVS_SVC_ATTR_ADDR"] == server.address
    assert parts["IPVS_SVC_ATTR_PORT"] == server.port
    assert parts["IPVS_SVC_ATTR_SCHED_NAME"] == "wlc"
    assert parts["IPVS_SVC_ATTR_FLAGS"]["flags"] == 0


def test_a_virtual_server_of_a_mark_names_no_address(requests: ipvs.Ipvs) -> None:
    parts = service(decoded(requests.add(MARKED, Scheduling("rr"))))
    assert parts["IPVS_SVC_ATTR_FWMARK"] == 0x30C57
    assert "IPVS_SVC_ATTR_ADDR" not in parts


def test_persistence_is_a_flag_and_seconds_for_each_client_address(requests: ipvs.Ipvs) -> None:
    parts = service(decoded(requests.edit(WEB, Scheduling("rr", 10800))))
    assert parts["IPVS_SVC_ATTR_FLAGS"]["flags"] == 1
    assert parts["IPVS_SVC_ATTR_TIMEOUT"] == 10800
    assert parts["IPVS_SVC_ATTR_NETMASK"] == "255.255.255.255"


@pytest.mark.parametrize(
    ("server", "endpoint"),
    [(WEB, Endpoint("10.180.0.1", 8080)), (WEB6, Endpoint("fd00:10::1", 8080))],
    ids=["ipv4", "ipv6"],
)
def test_a_destination_is_translated_to_and_has_a_weight(
    requests: ipvs.Ipvs, server: VirtualServer, endpoint: Endpoint
) -> None:
    parts = destination(decoded(requests.weigh_destination(server, endpoint, 0)))
    assert parts["IPVS_DEST_ATTR_PORT"] == endpoint.port
    assert parts["IPVS_DEST_ATTR_WEIGHT"] == 0
    assert parts["IPVS_DEST_ATTR_FWD_METHOD"] == 0
    assert destination(decoded(requests.add_destination(server, endpoint)))["IPVS_DEST_ATTR_WEIGHT"] == 1


def test_timeouts_are_seconds(requests: ipvs.Ipvs) -> None:
    parts = dict(decoded(requests.set_timeouts(Timeouts(tcp=900, tcp_fin=120, udp=300)))["attrs"])
    assert list(parts) == [f"IPVS_CMD_ATTR_TIMEOUT_{name}" for name in ("TCP", "TCP_FIN", "UDP")]
    assert list(parts.values()) == ["84:03:00:00", "78:00:00:00", "2c:01:00:00"]


TABLE = """\
IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  AC1E0029:0050 rr  
  -> 0AB40001:1F90      Masq    1      2          3         
  -> 0AB40002:1F90      Masq    0      0          1         
UDP  AC1E000A:0035 rr persistent 600 FFFFFFFF
TCP  [fd00:0030:0000:0000:0000:0000:0000:0041]:01BB mh (mh-fallback)
  -> [fd00:0010:0000:0000:0000:0000:0000:0001]:1F90      Masq    1      0          0         
FWM  00030C57 rr  
  -> [fd00:0010:0000:0000:0000:0000:0000:0002]:1F90      Masq    1      4          0         
"""  # noqa: W291 as the kernel pads it


def test_the_table_of_the_kernel_tells_destinations_weights_and_connections() -> None:
    assert dict(ipvs._parse(TABLE, {0x30C57: Family.IPV6})) == {
        WEB: {
            Endpoint("10.180.0.1", 8080): Destination(1, 2, 3),
            Endpoint("10.180.0.2", 8080): Destination(0, 0, 1),
        },
        VirtualServer(Family.IPV4, 17, "172.30.0.10", 53): {},
        WEB6: {Endpoint("fd00:10::1", 8080): Destination(1, 0, 0)},
        MARKED: {Endpoint("fd00:10::2", 8080): Destination(1, 4, 0)},
    }


CONNECTIONS = """\
Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP C0000264 E9FC AC1E0029 0050 0AB40001 1F90 TIME_WAIT        95
TCP C0000264 E9FE AC1E0029 0051 0AB40001 1F90 FIN_WAIT         95
TCP fd00:0010:0000:0000:0000:0000:0000:0009 E9FC fd00:0030:0000:0000:0000:0000:0000:0041 01BB fd00:0010:0000:0000:0000:0000:0000:0001 1F90 ESTABLISHED     899
"""  # noqa: E501


def test_a_connection_is_unfinished_until_both_sides_have_closed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ip_vs_conn").write_text(CONNECTIONS)
    monkeypatch.setattr(ipvs, "_CONNECTIONS", str(tmp_path / "ip_vs_conn"))
    found = ipvs.Ipvs.unfinished()
    assert found == {("172.30.0.41", 81), ("fd00:30::41", 443)}


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6) | st.integers(0, 1 << 48).map(IPv6Address))
def test_addresses_are_written_as_everywhere_else(address: IPv4Address | IPv6Address) -> None:
    family = Family.IPV4 if address.version == 4 else Family.IPV6
    assert ipvs._text(family, address.packed) == str(address)
