"""kube-proxy itself in the agents' place: `KUBE_PROXY=BINARY pytest tests/netns` judges the tables by it.

`python -m tests.netns.reference FILE HOST PORT` is what it watches: a minimal apiserver over a manifest file.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
_KINDS = {
    "services": ("v1", "Service"),
    "nodes": ("v1", "Node"),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "servicecidrs": ("networking.k8s.io/v1", "ServiceCIDR"),
}


class State:
    """The objects of the file, with versions; a thread rereads it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self.version = 1
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.log: list[tuple[str, Object]] = []
        self.reread()
        threading.Thread(target=self._poll, daemon=True).start()

    def reread(self) -> None:
        new = {}
        for text in self._path.read_text().split("\n---\n"):
            each = json.loads(text)
            meta = each["metadata"]
            new[each["kind"], meta.get("namespace", ""), meta["name"]] = each
        with self._changed:
            for key in [*self.objects, *(key for key in new if key not in self.objects)]:
                self._step(key, new.get(key))
            self._changed.notify_all()

    def _step(self, key: tuple[str, str, str], new: Object | None) -> None:
        old = self.objects.get(key)
        if new is None:
            assert old is not None
            self.version += 1
            self.log.append(("DELETED", self._versioned(old)))
            del self.objects[key]
        elif old is None or self._bare(old) != self._bare(new):
            self.version += 1
            self.objects[key] = self._versioned(new)
            self.log.append(("ADDED" if old is None else "MODIFIED", self.objects[key]))

    def _versioned(self, each: Object) -> Object:
        meta = each["metadata"] | {
            "resourceVersion": str(self.version),
            "uid": f"uid-{each['metadata']['name']}",
        }
        return each | {"metadata": meta}

    def _bare(self, each: Object) -> Object:
        drop = ("resourceVersion", "uid")
        return each | {"metadata": {k: v for k, v in each["metadata"].items() if k not in drop}}

    def _poll(self) -> None:
        seen = self._path.stat().st_mtime_ns
        while True:
            time.sleep(0.02)
            now = self._path.stat().st_mtime_ns
            if now != seen:
                seen = now
                self.reread()

    def snapshot(self) -> tuple[list[Object], int, int]:
        with self._changed:
            return list(self.objects.values()), self.version, len(self.log)

    def follow(self, position: int, seconds: float) -> Iterator[tuple[str, Object]]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._changed:
                if len(self.log) == position:
                    self._changed.wait(timeout=1.0)
                fresh = self.log[position:]
            position += len(fresh)
            yield from fresh


class Handler(BaseHTTPRequestHandler):
    """Lists and watches; anything else is acknowledged and forgotten."""

    state: State
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._whole(body, 201)

    do_PATCH = do_PUT = do_POST

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = url.path.strip("/").split("/")
        plural = next((part for part in parts if part in _KINDS), None)
        if plural is None:
            self._whole(json.dumps({"major": "1", "minor": "37", "gitVersion": "v1.37.2"}).encode(), 200)
            return
        api, kind = _KINDS[plural]
        objects, version, position = self.state.snapshot()
        chosen = [each for each in objects if _selected(each, kind, query)]
        if parts[-1] != plural:
            found = next((each for each in chosen if each["metadata"]["name"] == parts[-1]), None)
            self._whole(json.dumps(found or {"kind": "Status", "code": 404}).encode(), 200 if found else 404)
        elif query.get("watch") not in ("true", "1"):
            meta = {"resourceVersion": str(version)}
            answer = {"apiVersion": api, "kind": f"{kind}List", "metadata": meta, "items": chosen}
            self._whole(json.dumps(answer).encode(), 200)
        else:
            self._watch(api, kind, query, chosen, version, position)

    def _watch(
        self, api: str, kind: str, query: dict[str, str], chosen: list[Object], version: int, position: int
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if query.get("sendInitialEvents") == "true":
            for each in chosen:
                self._event("ADDED", each)
            marks = {"k8s.io/initial-events-end": "true"}
            meta = {"resourceVersion": str(version), "annotations": marks}
            self._event("BOOKMARK", {"apiVersion": api, "kind": kind, "metadata": meta})
            known = {_key(each) for each in chosen}
        else:
            since = int(query.get("resourceVersion") or 0)
            with_version = [
                each for each in self.state.log if int(each[1]["metadata"]["resourceVersion"]) > since
            ]
            position -= len(with_version)
            known = {_key(each) for each in chosen}
        for verb, each in self.state.follow(position, float(query.get("timeoutSeconds", 300))):
            if each["kind"] != kind:
                continue
            fits = verb != "DELETED" and _selected(each, kind, query)
            if not fits and _key(each) in known:
                known.discard(_key(each))
                self._event("DELETED", each)
            elif fits:
                self._event("MODIFIED" if _key(each) in known else "ADDED", each)
                known.add(_key(each))
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, verb: str, each: Object) -> None:
        line = json.dumps({"type": verb, "object": each}).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    def _whole(self, body: bytes, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _key(each: Object) -> tuple[str, str]:
    return each["metadata"].get("namespace", ""), each["metadata"]["name"]


def _selected(each: Object, kind: str, query: dict[str, str]) -> bool:
    labels = each["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        if term.startswith("!") and term[1:] in labels:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = term.partition("!=" if "!=" in term else "=")
        actual: Any = each
        for step in name.split("."):
            actual = actual.get(step, "") if isinstance(actual, dict) else ""
        if (actual == value) == ("!=" in term):
            return False
    return bool(each["kind"] == kind)


def main(path: str, host: str, port: str) -> None:
    """Serve for ever."""
    Handler.state = State(Path(path))
    server = ThreadingHTTPServer((host, int(port)), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
