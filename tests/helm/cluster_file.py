"""The mounted cluster file, read as the pods would read it."""

from pathlib import Path

from baton.cli.setup.certs import certs
from baton.config import ClusterConfig, load_config
from tests.helm.checks import FROM_SECRET, Object, pod_of

PASSWORD = "0123456789abcdef"


def cluster_file(documents: list[Object]) -> str:
    """Return the text of the router's cluster file."""
    volumes = pod_of(documents, "-router").spec["volumes"]
    (name,) = (volume["configMap"]["name"] for volume in volumes if volume["name"] == "config")
    (found,) = (one for one in documents if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name)
    return str(found["data"]["cluster.yaml"])


def load(documents: list[Object], folder: Path) -> ClusterConfig:
    """Load the file with the environment of the router's pod. Required certificates are created in `folder`."""
    text = cluster_file(documents)
    if "/etc/baton-tls" in text:
        certs(folder / "made", ["baton.example"], days=2)
        for made, mounted in (("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")):
            (folder / mounted).write_bytes((folder / "made" / made).read_bytes())
    file = folder / "cluster.yaml"
    file.write_text(text.replace("/etc/baton-tls", str(folder)), encoding="utf-8")
    (container,) = pod_of(documents, "-router").spec["containers"]
    variables = {one["name"]: one.get("value", "") for one in container["env"]}
    return load_config(file, env={name: value.replace(FROM_SECRET, PASSWORD) for name, value in variables.items()})
