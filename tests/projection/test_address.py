import pytest

from rulecast.address import AddressError, canonical_cidr, canonical_ip


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.96.0.1", "10.96.0.1"),
        ("172.30.0.041", "172.30.0.41"),
        ("10.180.00.001", "10.180.0.1"),
        ("192.168.099.022", "192.168.99.22"),
        ("2001:DB8::5", "2001:db8::5"),
        ("2001:0db8:0000:0000:0000:0000:0000:0005", "2001:db8::5"),
        ("2001:00db8::1", "2001:db8::1"),
        ("1:0:0:2:0:0:0:3", "1:0:0:2::3"),
        ("2001:db8:0:1:1:1:1:1", "2001:db8:0:1:1:1:1:1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:a00:1", "10.0.0.1"),
        ("::ffff:10.0.0.001", "10.0.0.1"),
        ("::1.2.3.4", "::102:304"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
    ],
)
def test_addresses_that_are_equal_are_equal_text(text: str, canonical: str) -> None:
    assert canonical_ip(text) == canonical
    assert canonical_ip(canonical) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None",
        "<nil>",
        "10.96.0.300",
        "10.96.0",
        "10.96.0.1.1",
        "1.2.3.-4",
        "1.2.3.+4",
        "1.2.3.4\n",
        "1.2.3.4\0",
        " 1.2.3.4",
        "0x1.2.3.4",
        "٣.2.3.4",
        "²1.2.3.4",
        "fe80::1%eth0",
        "[::1]",
        "::1::",
        "1:2:3",
        "g::1",
        "10.0.0.1/8",
        "1" * 5000,
        ":" * 5000,
    ],
)
def test_what_is_no_address_is_named_in_the_error(text: str) -> None:
    with pytest.raises(AddressError, match="not an IP address") as caught:
        canonical_ip(text)
    assert len(str(caught.value)) < 450


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("203.0.113.000/025", "203.0.113.0/25"),
        (" 203.0.113.0/25\t", "203.0.113.0/25"),
        ("192.168.1.77/24", "192.168.1.0/24"),
        ("10.0.0.1/32", "10.0.0.1/32"),
        ("1.2.3.4/0", "0.0.0.0/0"),
        ("2001:DB8::5/32", "2001:db8::/32"),
        ("2001:db8::5/127", "2001:db8::4/127"),
        ("::1/0", "::/0"),
        ("::ffff:10.1.2.3/120", "10.1.2.0/24"),
        ("::ffff:10.1.2.3/96", "0.0.0.0/0"),
        ("::ffff:10.1.2.3/80", "::/80"),
    ],
)
def test_cidrs_are_networks_in_canonical_text(text: str, canonical: str) -> None:
    assert canonical_cidr(text) == canonical
    assert canonical_cidr(canonical) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.0",
        "10.0.0.0/",
        "10.0.0.0/33",
        "::/129",
        "10.0.0.0/-1",
        "10.0.0.0/+8",
        "/8",
        "a/8",
        "10.0.0.0/8/8",
        "10.0.0.0/²",
        "10.0.0.0/" + "0" * 5000 + "8",
        "::ffff:10.0.0.0/129",
    ],
)
def test_what_is_no_cidr_is_named_in_the_error(text: str) -> None:
    with pytest.raises(AddressError, match="not a CIDR"):
        canonical_cidr(text)
