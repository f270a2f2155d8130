"""`rulecast certs`: what openssl makes of it, in files and in a cluster's objects."""

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from rulecast.errors import UsageError
from rulecast_server.certs.command import complete, main, parse
from rulecast_server.certs.pki import Openssl, Pair
from rulecast_server.certs.places import DirectoryPlace
from rulecast_server.certs.plan import Terms
from rulecast_server.rpc.credentials import ReloadingCredentials, TlsFiles

NAME = "rulecast-server.rulecast.svc"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "new"
    done = subprocess.run(
        [sys.executable, "-m", "rulecast.cli", "certs", "--dir", str(directory), "--name", "rules.example"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "PRIVATE" not in done.stdout + done.stderr
    return directory


@pytest.mark.parametrize("name", [NAME, f"{NAME}.cluster.local", "localhost", "rules.example"])
def test_a_client_that_trusts_the_bundle_takes_the_server_for_its_names(directory: Path, name: str) -> None:
    assert handshake(directory, name)


def test_and_for_no_other(directory: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(directory, "other.rulecast.svc")


def handshake(directory: Path, name: str) -> bool:
    client = ssl.create_default_context(cafile=directory / "ca.crt")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(directory / "server.crt", directory / "server.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
    return True


def test_the_server_takes_the_files_and_keys_are_private(directory: Path) -> None:
    ReloadingCredentials(TlsFiles(directory / "server.crt", directory / "server.key", None))
    for key in directory.glob("*.key"):
        assert key.stat().st_mode & 0o077 == 0
    assert {each.name for each in directory.iterdir()} == {
        *("ca.crt", "authority.crt", "authority.key", "server.crt", "server.key")
    }


def test_a_second_run_leaves_every_file_as_it_is(directory: Path) -> None:
    before = {each: each.stat().st_ino for each in directory.iterdir()}
    assert main(["--dir", str(directory), "--name", "rules.example"]) == 0
    assert {each: each.stat().st_ino for each in directory.iterdir()} == before


def test_openssl_judges_what_it_made() -> None:
    pki = Openssl()
    one, two = pki.new_authority(days=10), pki.new_authority(days=10)
    pair = pki.issue(one, ["a.example", "b.example"], days=5)
    assert pki.fits(pair)
    assert not pki.fits(Pair(pair.cert, two.key))
    assert pki.lasts(pair.cert, days=4.9)
    assert not pki.lasts(pair.cert, days=5.1)
    assert pki.names(pair.cert, ["b.example"])
    assert not pki.names(pair.cert, ["a.example", "c.example"])
    assert pki.verifies(pair.cert, two.cert + one.cert)
    assert not pki.verifies(pair.cert, two.cert)
    assert not pki.verifies(pair.cert, "")
    assert not pki.verifies(one.cert, two.cert)
    for garbage in ("", "garbage", pair.key):
        assert not pki.lasts(garbage, days=0)
        assert not pki.names(garbage, [])
        assert not pki.fits(Pair(garbage, garbage))


def test_secrets_are_in_no_text_of_a_pair() -> None:
    assert "secret" not in repr(Pair("cert", "secret")) + str(Pair("cert", "secret"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--days", "0"], ["--days", "'0'"]),
        (["--days", "20"], ["--renew", "--days"]),
        (["--authority-renew", "60"], ["--authority-renew"]),
        (["--authority-days", "300"], ["--authority-days"]),
        (["--name", "a b"], ["--name", "'a b'"]),
        (["--name", "a,DNS:evil.example"], ["--name"]),
        (["--namespace", ""], ["--namespace"]),
        (["--dir", "x", "--kubeconfig", "/dev/null"], ["--dir", "--kubeconfig"]),
        (["--kubeconfig", "/does/not/exist"], ["--kubeconfig", "/does/not/exist"]),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(argv: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_openssl_one_line_says_so(tmp_path: Path) -> None:
    run = complete(DirectoryPlace(tmp_path), Terms(names=("a",)), Openssl("no-such-openssl"))
    with pytest.raises(UsageError, match=r"no-such-openssl: No such file"):
        asyncio.run(run)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file: (Not a directory|File exists)|Not a directory"):
        main(["--dir", str(tmp_path / "file")])
