"""docs/grpcurl.md: each command that it shows works, and prints what it shows."""

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from rulecast.model import FLEET, NodeInfo, node_scope
from tests.wire import values
from tests.wire.waiting import eventually

GRPCURL = os.environ.get("GRPCURL") or shutil.which("grpcurl") or ""
VARIES = {"agent_version", "apply_ms", "connected_seconds", "lag_ms", "waited_ms"}
DOC = Path(__file__).parents[2] / "docs" / "grpcurl.md"

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not GRPCURL, reason="no grpcurl on PATH and no GRPCURL"),
]


class Example(NamedTuple):
    command: str
    output: str


def examples() -> list[Example]:
    """The commands after `$ `, each with the indented lines that follow it."""
    found: list[Example] = []
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", DOC.read_text(), re.MULTILINE):
        text = re.sub(r"^    ", "", block, flags=re.MULTILINE)
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            # The next example's set-up may stand in the same run of indented lines.
            found.append(Example(command, re.split(r"\n(?=RV=)", output)[0].strip()))
    return found


def documents(output: str) -> list[object]:
    """The JSON documents in an output; text between them is left out."""
    if not output.startswith("{"):
        return []
    decoder, found, at = json.JSONDecoder(), [], 0
    while at >= 0:
        document, end = decoder.raw_decode(output, at)
        found.append(document)
        at = output.find("\n{", end)
        at += at >= 0
    return found


def shape(value: object) -> object:
    """A value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if key not in VARIES}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return "number" if str(value).isdecimal() else re.sub(r"^ipv4:.*", "ipv4:", str(value))


async def test_each_documented_command_prints_what_is_documented(start_server, start_agent) -> None:
    nodes = ("node1", "node2")
    server = await start_server(
        contents={
            FLEET: {values.service("web"): values.port("web")},
            **{node_scope(name): {values.NODE: NodeInfo(name=name)} for name in nodes},
        }
    )
    versions = dict.fromkeys(("endpointslices", "nodes", "servicecidrs", "services"), 603)
    server.hub.log.resource_versions = versions
    server.hub.seen = lambda: {**versions, "endpointslices": 609}
    await server.rpc.set_serving(serving=True)
    for name in nodes:
        start_agent(server.address, node=name)
    await eventually(lambda: server.hub.counters.acks == len(nodes))
    shown = examples()
    assert len(shown) > 10
    for example in shown:
        script = f'g() {{ "{GRPCURL}" -plaintext "$@"; }}\nRV=609\n' + example.command.replace(
            "localhost:9443", server.address
        )
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output = (await process.communicate())[0].decode()
        if not example.output or '"timeout_ms": 2000' in example.command:
            # Long, or of a node that had been stopped.
            assert documents(output), output
        elif documents(example.output):
            assert shape(documents(output)) == shape(documents(example.output)), example.command
        else:
            assert output.split() == example.output.split(), example.command
