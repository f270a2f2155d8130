"""A directory of manifests as the source: what it holds, as it changes, with broken files among good ones."""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from rulecast.errors import UsageError
from rulecast_server.kube.manifests import ManifestSource
from rulecast_server.kube.objects import Service
from rulecast_server.kube.open import open_source
from rulecast_server.settings import SourceSettings
from tests.watch.harness import Object, Recorder, cidr, eventually, node, piece, running, service

pytestmark = pytest.mark.asyncio

INTERVAL = 0.02
NEWLINE = "\n"


def replace(path: Path, *objects: Object) -> None:
    """Atomically, as YAML documents."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(yaml.safe_dump_all(objects))
    new.rename(path)


@asynccontextmanager
async def watching(directory: Path) -> AsyncIterator[tuple[ManifestSource, Recorder]]:
    source = ManifestSource(directory, interval=INTERVAL)
    source.load()
    async with running(source) as seen:
        await eventually(lambda: bool(seen.synced_after))
        yield source, seen


def as_yaml(*objects: Object) -> str:
    return yaml.safe_dump_all(objects)


def as_json_documents(*objects: Object) -> str:
    return "\n---\n".join(json.dumps(each, indent=1) for each in objects)


def as_list(*objects: Object) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("all.yaml", as_yaml),
        ("all.yml", as_yaml),
        ("all.yaml", as_json_documents),
        ("all.json", as_list),
        ("all.yaml", lambda *objects: yaml.safe_dump(json.loads(as_list(*objects)))),
    ],
    ids=["yaml", "yml", "json documents", "json list", "yaml list"],
)
async def test_every_form_of_file_gives_the_same_objects(
    tmp_path: Path, name: str, write: Callable[..., str]
) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"a": "b"}}
    (tmp_path / name).write_text(write(service(), config_map, piece("a", ["10.0.0.1"]), node(), cidr()))
    async with watching(tmp_path) as (source, seen):
        assert set(seen.objects) == {
            ("services", "default", "web"),
            ("endpointslices", "default", "a"),
            ("nodes", "", "n1"),
            ("servicecidrs", "", "kubernetes"),
        }
        assert seen.synced_after == [4]
        assert source.problems() == []


async def test_a_typed_list_may_leave_the_kind_of_its_items_out(tmp_path: Path) -> None:
    item = {key: value for key, value in service().items() if key not in ("kind", "apiVersion")}
    (tmp_path / "a.json").write_text(json.dumps({"apiVersion": "v1", "kind": "ServiceList", "items": [item]}))
    async with watching(tmp_path) as (_, seen):
        assert seen.names("services") == {"web"}


async def test_an_object_without_namespace_is_in_the_default_one(tmp_path: Path) -> None:
    item = service()
    del item["metadata"]["namespace"]
    replace(tmp_path / "a.yaml", item, node(namespace="ignored"))
    async with watching(tmp_path) as (_, seen):
        assert set(seen.objects) == {("services", "default", "web"), ("nodes", "", "n1")}


async def test_timestamps_stay_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "apiVersion: v1\nkind: Service\nmetadata: {name: web, creationTimestamp: 2026-01-01T00:00:00Z}\n"
    )
    async with watching(tmp_path) as (_, seen):
        web = seen.objects["services", "default", "web"]
        assert isinstance(web, Service)
        assert web.metadata.creation_timestamp == "2026-01-01T00:00:00Z"


async def test_the_selectors_of_the_api_server_hold_here_too(tmp_path: Path) -> None:
    hidden = {"service.kubernetes.io/service-proxy-name": "x"}
    headless = {"service.kubernetes.io/headless": ""}
    replace(
        tmp_path / "a.yaml",
        service(),
        service("none", "None"),
        service("foreign", labels=hidden),
        piece("a", []),
        piece("b", [], labels=headless),
    )
    async with watching(tmp_path) as (_, seen):
        assert (seen.names("services"), seen.names("endpointslices")) == ({"web"}, {"a"})


async def test_an_empty_directory_syncs(tmp_path: Path) -> None:
    async with watching(tmp_path) as (_, seen):
        assert seen.synced_after == [0]


async def test_files_that_come_change_and_go_give_the_differences(tmp_path: Path) -> None:
    replace(tmp_path / "a.yaml", service("a"), service("b"))
    async with watching(tmp_path) as (_, seen):
        mark = len(seen.log)
        replace(tmp_path / "a.yaml", service("a"), service("b", "10.96.0.99"))
        await eventually(lambda: len(seen.log) > mark)
        replace(tmp_path / "more.yml", service("c"))
        await eventually(lambda: "c" in seen.names("services"))
        (tmp_path / "a.yaml").unlink()
        await eventually(lambda: seen.names("services") == {"c"})
        assert sorted(seen.since(mark)) == [
            ("services", "a", "gone"),
            ("services", "b", "gone"),
            ("services", "b", "set"),
            ("services", "c", "set"),
        ]
        assert len(seen.synced_after) == 1


async def test_a_rewrite_without_meaning_is_silent(tmp_path: Path) -> None:
    replace(tmp_path / "a.yaml", service())
    async with watching(tmp_path) as (source, seen):
        mark, reloads = len(seen.log), source.reloads
        replace(tmp_path / "a.yaml", service(annotations={"note": "x"}))
        await eventually(lambda: source.reloads > reloads)
        assert seen.since(mark) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("kind: Service\nmetadata:\n  name: [web\n", "bad.yaml:4:"),
        (
            as_yaml(service("x")) + "---\nkind: Service\nmetadata: {name: y}\nspec: {ports: [{port: a}]}\n",
            f"bad.yaml:{as_yaml(service('x')).count(NEWLINE) + 2}:",
        ),
        ("\n\nkind: Service\napiVersion: v1\nmetadata: {namespace: x}\n", "bad.yaml:3:"),
        ("apiVersion: v1\n", "bad.yaml:1:"),
        ("- a\n- b\n", "bad.yaml:1:"),
        ("just text", "bad.yaml:1:"),
        ("kind: List\nitems: 5\n", "bad.yaml:1:"),
        ('{"kind": "Service",\n "metadata": {"name": }\n', "bad.yaml:"),
        ("kind: ConfigMap\n---\nkind: [\n", "bad.yaml:4:"),
        ("a: \x07\n", "bad.yaml:"),
    ],
    ids=[
        "syntax",
        "type",
        "no name",
        "no kind",
        "list",
        "text",
        "items",
        "json",
        "second document",
        "control",
    ],
)
async def test_a_broken_file_at_the_start_is_one_line_with_file_and_line(
    tmp_path: Path, text: str, where: str
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    replace(tmp_path / "good.yaml", service())
    with pytest.raises(UsageError) as caught:
        await open_source(SourceSettings(manifests=tmp_path))
    message = str(caught.value)
    assert f"{tmp_path}/{where}" in message
    assert "\n" not in message


async def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"bad\.yaml: not UTF-8"):
        ManifestSource(tmp_path).load()


async def test_a_file_that_breaks_keeps_its_last_good_objects_and_is_told(tmp_path: Path) -> None:
    replace(tmp_path / "a.yaml", service("a"))
    replace(tmp_path / "b.yaml", service("b"))
    async with watching(tmp_path) as (source, seen):
        mark = len(seen.log)
        (tmp_path / "a.yaml").write_text("kind: Service\nmetadata: {name: [\n")
        await eventually(lambda: any("a.yaml:3" in problem for problem in source.problems()))
        replace(tmp_path / "b.yaml", service("b", "10.96.0.99"))
        await eventually(lambda: len(seen.log) > mark)
        assert seen.since(mark) == [("services", "b", "set")]
        assert source.broken_readings == 1
        replace(tmp_path / "a.yaml", service("a", "10.96.0.98"))
        await eventually(lambda: source.problems() == [])
        assert seen.since(mark) == [("services", "b", "set"), ("services", "a", "set")]


async def test_a_broken_file_that_is_deleted_takes_its_objects_with_it(tmp_path: Path) -> None:
    replace(tmp_path / "a.yaml", service("a"))
    async with watching(tmp_path) as (source, seen):
        (tmp_path / "a.yaml").write_text("[")
        await eventually(lambda: bool(source.problems()))
        (tmp_path / "a.yaml").unlink()
        await eventually(lambda: seen.names("services") == set())
        assert source.problems() == []


async def test_a_file_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    """A YAML file cut at a document mark is a good one with objects missing."""
    objects = [service(f"s{i}") for i in range(20)]
    replace(tmp_path / "a.yaml", *objects)
    source = ManifestSource(tmp_path)
    source.load()
    text = (tmp_path / "a.yaml").read_text()
    documents = text.split("---\n")
    with (tmp_path / "a.yaml").open("w") as file:
        for document in documents:
            file.write(document + "---\n")
            file.flush()
            # A look between any two writes sees the file move.
            assert source._scan(settled=False) is False
    assert source.problems() == []


async def test_an_object_in_two_files_counts_as_in_the_first_by_name_and_is_told(tmp_path: Path) -> None:
    replace(tmp_path / "b.yaml", service("web", "10.96.0.2"))
    replace(tmp_path / "a.yaml", service("web", "10.96.0.1"))
    async with watching(tmp_path) as (source, seen):

        def ip() -> str | None:
            web = seen.objects["services", "default", "web"]
            assert isinstance(web, Service)
            return web.spec.cluster_ip

        assert ip() == "10.96.0.1"
        assert source.problems() == ["services/default/web: in a.yaml:1, b.yaml:1; a.yaml:1 counts"]
        (tmp_path / "a.yaml").unlink()
        await eventually(lambda: ip() == "10.96.0.2")
        assert source.problems() == []


async def test_a_directory_that_goes_away_takes_nothing_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "manifests"
    directory.mkdir()
    replace(directory / "a.yaml", service())
    async with watching(directory) as (source, seen):
        mark = len(seen.log)
        directory.rename(tmp_path / "elsewhere")
        await eventually(lambda: bool(source.problems()))
        assert seen.since(mark) == []
        (tmp_path / "elsewhere").rename(directory)
        await eventually(lambda: source.problems() == [])
        assert seen.since(mark) == []


async def test_a_mounted_config_map_changes_by_its_link(tmp_path: Path) -> None:
    for version, ip in (("..1", "10.96.0.1"), ("..2", "10.96.0.2")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(as_yaml(service(ip=ip)))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    async with watching(tmp_path) as (_, seen):
        mark = len(seen.log)
        (tmp_path / "..new").symlink_to("..2")
        os.replace(tmp_path / "..new", tmp_path / "..data")
        await eventually(lambda: len(seen.log) > mark)
        assert seen.since(mark) == [("services", "web", "set")]


@pytest.mark.parametrize("kind", ["FIFO", "loop of links"])
async def test_what_takes_the_place_of_a_file_and_cannot_be_read_is_told_and_deletes_nothing(
    tmp_path: Path, kind: str
) -> None:
    replace(tmp_path / "a.yaml", service("web"))
    (tmp_path / "folder.yaml").mkdir()
    async with watching(tmp_path) as (source, seen):
        await eventually(lambda: ("services", "default", "web") in seen.objects)
        (tmp_path / "a.yaml").unlink()
        if kind == "FIFO":
            # Opening it lasts until somebody writes to it.
            os.mkfifo(tmp_path / "a.yaml")
        else:
            (tmp_path / "a.yaml").symlink_to("a.yaml")
        await eventually(lambda: source.problems() != [])
        assert str(tmp_path / "a.yaml") in source.problems()[0]
        assert ("services", "default", "web") in seen.objects
        (tmp_path / "a.yaml").unlink()
        replace(tmp_path / "a.yaml", service("other"))
        await eventually(lambda: ("services", "default", "other") in seen.objects)
        assert source.problems() == []


async def test_kinds_that_are_not_used_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    typed = {"apiVersion": "v1", "kind": "Services", "metadata": {"name": "web"}}
    replace(tmp_path / "a.yaml", typed, typed, service("web"))
    with caplog.at_level("INFO"):
        ManifestSource(tmp_path).load()
    assert f"{tmp_path / 'a.yaml'}: not used: 2 v1 Services" in caplog.text
