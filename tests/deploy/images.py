"""What deploy/Dockerfile says of each target."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

DOCKERFILE = Path(__file__).parents[2] / "deploy" / "Dockerfile"


class Stage(msgspec.Struct):
    """One stage, with what it has from the stage that it builds on."""

    base: str
    user: str = ""
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    copies: list[tuple[str, ...]] = msgspec.field(default_factory=list)
    runs: list[str] = msgspec.field(default_factory=list)


def arguments() -> dict[str, str]:
    """ARG before the first stage: name to default."""
    head = DOCKERFILE.read_text().partition("\nFROM ")[0]
    return dict(re.findall(r"^ARG (\w+)=(.+)$", head, re.MULTILINE))


def stages() -> dict[str, Stage]:
    """By name."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found: dict[str, Stage] = {}
    name = ""
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = msgspec.structs.replace(found[base], runs=[]) if base in found else Stage(base)
            found[name].copies = []
        elif word == "USER":
            found[name].user = rest
        elif word == "ENTRYPOINT":
            found[name].entrypoint = json.loads(rest)
            found[name].command = ()
        elif word == "CMD":
            found[name].command = json.loads(rest)
        elif word == "COPY":
            found[name].copies.append(tuple(rest.split()))
        elif word == "RUN":
            found[name].runs.append(" ".join(rest.split()))
    return found
