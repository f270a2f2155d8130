"""The API server stand-in as a process: `python -m tests.fakes.serve [--manifests FILE]`."""

import argparse
import asyncio
import contextlib
import json
from pathlib import Path

from tests.fakes.apiserver import FakeApiServer
from tests.fakes.apiserver_state import Object, key_of

Objects = dict[tuple[str, str, str], Object]


async def _serve(host: str, port: int, manifests: Path | None) -> None:
    api = FakeApiServer()
    await api.start(host, port)
    print(f"http://{host}:{api.port}", flush=True)
    try:
        if manifests is None:
            await asyncio.Event().wait()
        else:
            await _follow_file(api, manifests)
    finally:
        await api.stop()


async def _follow_file(api: FakeApiServer, path: Path) -> None:
    """Hold what a file of JSON documents says, now and whenever it is replaced."""
    held: Objects = {}
    seen = -1
    while True:
        seen, new = _read(path, seen, held)
        for key in held.keys() - new.keys():
            api.delete(held[key])
        api.put(*(item for key, item in new.items() if held.get(key) != item))
        held = new
        await asyncio.sleep(0.02)


def _read(path: Path, seen: int, held: Objects) -> tuple[int, Objects]:
    changed = path.stat().st_mtime_ns
    if changed == seen:
        return seen, held
    items = [json.loads(text) for text in path.read_text().split("\n---\n")]
    return changed, {(item["kind"], *key_of(item)): item for item in items}


def main() -> None:
    """Serve until interrupted; prints the URL."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--manifests", type=Path, help="hold what this file says (JSON, `---` between)")
    flags = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(flags.host, flags.port, flags.manifests))


if __name__ == "__main__":
    main()
