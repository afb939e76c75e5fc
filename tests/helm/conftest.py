"""Both versions of helm, and the chart rendered by them."""

import dataclasses
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.binaries import PACKAGES, NoHelmError, helm_binary
from tests.helm.schemas import ROOT, Schemas, find_folder

CHART = ROOT / "helm/baton"
MINIMAL = CHART / "ci/minimal-values.yaml"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
NAMES = [path.name.removesuffix("-values.yaml") for path in CI]
HELM_S = 60.0
RELEASE, NAMESPACE = "one", "serving"
# Each helm's tests run in one process, so that it renders each chart once.
EACH = [pytest.param(one, id=f"helm{one[0]}", marks=pytest.mark.xdist_group(f"helm{one[0]}")) for one in PACKAGES]


@dataclasses.dataclass(frozen=True)
class Helm:
    """A helm binary with its own environment."""

    binary: Path
    home: Path
    kubeconfig: Path | None = None

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run helm. `check`: raise AssertionError with its output if it fails."""
        folders = {f"HELM_{name}_HOME": str(self.home) for name in ("CACHE", "CONFIG", "DATA")}
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), **folders}
        environment["KUBECONFIG"] = str(self.kubeconfig or self.home / "none")
        done = subprocess.run(
            [str(self.binary), *arguments], capture_output=True, text=True, env=environment, timeout=HELM_S, check=False
        )
        if check and done.returncode:
            pytest.fail(f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done

    def render(self, *values: str | Path, sets: Sequence[str] = (), chart: Path = CHART) -> list[dict[str, Any]]:
        done = self.run(*self._template(values, sets, chart))
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    def refuses(self, *values: str | Path, sets: Sequence[str] = ()) -> str:
        """Return the error of `helm template` for these values, or an empty string if it renders them."""
        done = self.run(*self._template(values, sets, CHART), check=False)
        return done.stderr if done.returncode else ""

    def _template(self, values: Sequence[str | Path], sets: Sequence[str], chart: Path) -> list[str]:
        files = [part for path in values for part in ("-f", str(path))]
        return ["template", RELEASE, str(chart), "-n", NAMESPACE, *files, *(f"--set={item}" for item in sets)]


@pytest.fixture(scope="session", params=EACH)
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    cache = request.config.cache
    assert cache is not None
    try:
        binary = helm_binary(request.param, cache.mkdir("helm"))
    except NoHelmError as error:
        pytest.skip(str(error))
    return Helm(binary, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def known_schemas() -> Schemas | None:
    """The schemas of Kubernetes and of the CRDs, if available."""
    folder = find_folder()
    return Schemas(folder) if folder else None


@pytest.fixture(scope="session")
def schemas(known_schemas: Schemas | None) -> Schemas:
    if known_schemas is None:
        pytest.skip("no schemas of Kubernetes: ../shared/data/k8s-schemas is not here")
    return known_schemas


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> dict[str, list[dict[str, Any]]]:
    """The objects of each way to install, by its name."""
    return {name: helm.render(path) for name, path in zip(NAMES, CI, strict=True)}
