"""An API server for helm: discovery, objects in memory, open watches, and checks against schemas.

It has no controllers, so a Deployment creates nothing. Pods succeed immediately, because hooks wait for that. So a
watch finds all objects in their final state, and no change follows.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.helm.kube_formats import MAGIC, PLURALS, Object, api_version, decode_protobuf, discovery, merge_patch

PATH = re.compile(
    r"/api(?:s/(?P<group>[^/]+))?/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?"
)
Key = tuple[str, str, str]  # apiVersion, kind, name
Check = Callable[[Object], list[str]]


class RefusedError(Exception):
    """An error response with its Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        kind = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.status: Object = {**kind, "reason": reason, "message": message, "code": code}


@dataclass
class Cluster:
    """All objects of the only namespace. `check` returns the problems of an object that is written."""

    check: Check = lambda _: []
    objects: dict[Key, Object] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    _revisions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def kubeconfig(self) -> str:
        clusters = [{"name": "stub", "cluster": {"server": self.url}}]
        contexts = [{"name": "stub", "context": {"cluster": "stub", "user": "stub", "namespace": "serving"}}]
        users = [{"name": "stub", "user": {}}]
        parts = {"clusters": clusters, "contexts": contexts, "users": users, "current-context": "stub"}
        return yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **parts})

    def of_kind(self, kind: str) -> dict[str, Object]:
        return {name: found for (_, one, name), found in self.objects.items() if one == kind}

    def write(self, key: Key, new: Object) -> Object:
        """Store an object. Raises RefusedError."""
        problems = [] if key[1] == "Secret" else self.check(new)
        if problems:
            raise RefusedError(422, "Invalid", f"{key[1]} {key[2]}: {'; '.join(problems[:5])}")
        new["metadata"] |= {"namespace": "serving", "resourceVersion": str(next(self._revisions))}
        if key[1] == "Pod":
            new["status"] = {"phase": "Succeeded"}
        self.objects[key] = new
        return new

    def delete(self, key: Key) -> Object:
        gone = self.get(key)
        del self.objects[key]
        return gone

    def get(self, key: Key) -> Object:
        if key not in self.objects:
            raise RefusedError(404, "NotFound", f'{key[1]} "{key[2]}" not found')
        return self.objects[key]


class Handler(BaseHTTPRequestHandler):
    """One request. `served` sets `cluster`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: 40 ms for each request otherwise
    cluster: Cluster

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def answer(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = discovery(url.path)
        try:
            if found is None:
                found = self._object(url.path, query, raw)
            if found is not None:
                self._send(201 if self.command == "POST" else 200, found)
        except RefusedError as refused:
            self._send(refused.code, refused.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def _send(self, code: int, content: Object) -> None:
        body = json.dumps(content).encode()
        self._head(("Content-Length", str(len(body))), code)
        self.wfile.write(body)

    def _head(self, header: tuple[str, str], code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header(*header)
        self.end_headers()

    def _object(self, path: str, query: Mapping[str, str], raw: bytes) -> Object | None:
        parts = PATH.fullmatch(path)
        version = api_version(parts["group"] or "", parts["version"]) if parts else ""
        kind = PLURALS.get((version, parts["plural"])) if parts else None
        if parts is None or kind is None:
            raise RefusedError(404, "NotFound", f"no {path} here")
        if self.command == "GET" and parts["name"] is None:
            return self._list(version, kind, query)
        with self.cluster.lock:
            if self.command == "DELETE":
                return self.cluster.delete((version, kind, parts["name"]))
            body = decode_protobuf(raw) if raw.startswith(MAGIC) else yaml.safe_load(raw or b"{}")
            return self._one((version, kind, parts["name"] or body["metadata"]["name"]), body)

    def _one(self, key: Key, body: Object) -> Object:
        cluster, kept = self.cluster, self.cluster.objects.get(key)
        if self.command == "GET":
            return cluster.get(key)
        if self.command == "POST" and kept is not None:
            raise RefusedError(409, "AlreadyExists", f'{key[1]} "{key[2]}" already exists')
        if self.command == "PATCH":
            patch = self.headers.get("Content-Type", "")
            if "apply-patch" not in patch:  # an apply contains the whole object, because only helm applies
                body = merge_patch(cluster.get(key), body, strategic="strategic" in patch)
        return cluster.write(key, body)

    def _list(self, version: str, kind: str, query: Mapping[str, str]) -> Object | None:
        def selected(found: Object) -> bool:
            labels, metadata = found["metadata"].get("labels") or {}, found["metadata"]
            terms = [term.partition("=") for term in query.get("labelSelector", "").split(",") if term]
            name = query.get("fieldSelector", "").removeprefix("metadata.name=")
            asked = (found["apiVersion"], found["kind"]) == (version, kind) and name in {"", metadata["name"]}
            return asked and all(labels.get(key) == value for key, _, value in terms)

        with self.cluster.lock:
            items = [found for found in self.cluster.objects.values() if selected(found)]
        metadata: Object = {"resourceVersion": "1"}
        if query.get("watch") not in {"1", "true"}:
            return {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": items}
        self._head(("Connection", "close"))
        for item in items:
            self._event("ADDED", item)
        if "sendInitialEvents" in query:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
            self._event("BOOKMARK", {"apiVersion": version, "kind": kind, "metadata": metadata})
        self.cluster.closed.wait()
        return None

    def _event(self, what: str, about: Object) -> None:
        self.wfile.write(json.dumps({"type": what, "object": about}).encode() + b"\n")
        self.wfile.flush()


@contextmanager
def served(check: Check) -> Iterator[Cluster]:
    """Serve a cluster on a free loopback port until the block ends."""
    cluster = Cluster(check)
    handler = type("BoundHandler", (Handler,), {"cluster": cluster})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield cluster
        finally:
            cluster.closed.set()
            server.shutdown()
            thread.join()
