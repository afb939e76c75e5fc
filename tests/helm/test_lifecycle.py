"""An install and an upgrade as far as the chart asks the API server, which a few fixed answers stand in for."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.conftest import CHART, CI, NAMES, NAMESPACE, RELEASE, Helm

MINIMAL = CI[NAMES.index("minimal")]
WITHOUT_SCHEMAS = "--disable-openapi-validation"
KEPT = base64.b64encode(b"made at the install").decode()
SECRET_PATH = f"/api/v1/namespaces/{NAMESPACE}/secrets/one-baton-redis"
OURS = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
BY_HELM = {"app.kubernetes.io/managed-by": "Helm"}
METADATA = {"name": "one-baton-redis", "labels": BY_HELM, "annotations": OURS}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": METADATA, "data": {"password": KEPT}}
Answers = dict[str, dict[str, Any]]


def answers(documents: list[dict[str, Any]]) -> Answers:
    """The answers of an API server by path: the kinds of these objects, and the Secret of an earlier install."""
    found: Answers = {"/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}, SECRET_PATH: SECRET}
    groups = []
    for version in sorted({one["apiVersion"] for one in documents}):
        kinds = sorted({one["kind"] for one in documents if one["apiVersion"] == version})
        resources = [{"name": f"{kind.lower()}s", "namespaced": True, "kind": kind, "verbs": ["get"]} for kind in kinds]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        found[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        named = {"groupVersion": version, "version": version.rpartition("/")[2]}
        if "/" in version:
            groups.append({"name": version.partition("/")[0], "versions": [named], "preferredVersion": named})
    found["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return found


class Handler(BaseHTTPRequestHandler):
    """Looks the answer up by its path; all else is not found."""

    answers: Answers

    def do_GET(self) -> None:
        found = self.answers.get(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(found or missing).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def there(helm: Helm, tmp_path: Path) -> Iterator[Helm]:
    """A helm whose API server has the Secret of an earlier install."""
    handler = type("Bound", (Handler,), {"answers": answers(helm.render(MINIMAL))})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        clusters = [{"name": "stub", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}]
        contexts = [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}]
        parts = {"clusters": clusters, "contexts": contexts, "users": [{"name": "stub", "user": {}}]}
        config = tmp_path / "kubeconfig"
        config.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "stub", **parts}))
        yield dataclasses.replace(helm, kubeconfig=config)
        server.shutdown()
        thread.join()


def password(helm: Helm, *more: str) -> str:
    command = ("template", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(MINIMAL), *more)
    documents = [one for one in yaml.safe_load_all(helm.run(*command).stdout) if one]
    (found,) = (one["data"]["password"] for one in documents if one["kind"] == "Secret")
    return str(found)


def test_the_password_is_made_once(there: Helm):
    assert len(base64.b64decode(password(there))) == 40
    assert password(there, "--dry-run=server", WITHOUT_SCHEMAS) == KEPT


def test_notes_say_what_to_do_and_warn(there: Helm):
    sets = ("--set", "network.policy.enabled=false", "--dry-run=client", WITHOUT_SCHEMAS)
    said = there.run("install", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(MINIMAL), *sets).stdout
    assert "one-baton-router.serving.svc:50051" in said
    assert "WARNING security.allowInsecure" in said
    assert "every pod of this Kubernetes cluster may use" in said
