"""Homes of clusters, for one test or one module."""

import pytest
import torch

from tests.support.cluster_process import HANDED_OVER, ClusterProcess, Home
from tests.unit.test_tracing import collectors
from tools.clients import model_with_tools


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Show the ends of all logs of a failed test's clusters."""
    report = yield
    if report.failed:
        used = item.funcargs.values()
        homes = {
            one.home if isinstance(one, ClusterProcess) else one
            for one in used
            if isinstance(one, Home | ClusterProcess)
        }
        report.sections += [(f"logs of {home.path}", home.logs()) for home in homes]
    return report


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Compute references in one thread. Two that wait for each other while clusters run take 20 times as long."""
    torch.set_num_threads(1)


@pytest.fixture
def home(tmp_path):
    with Home(tmp_path).swept() as home:
        yield home


# Pools so small that decode preempts.
ORACLE = """
    router.queue.max_wait_s=60 determinism.verify=always
    model.path=oracle model.max_model_len=512 decode.kv_memory=96KiB prefill.kv_memory=96KiB
""".split()


@pytest.fixture(scope="session")
def collected():
    """An OpenTelemetry collector and its address. It receives only traces that a caller wants sampled."""
    with collectors() as made:
        yield made


@pytest.fixture(scope="session")
def oracle_cluster(tmp_path_factory, collected):
    """A cluster on the oracle for all tests that do not change it. They have the mark `xdist_group("oracle")`."""
    sets = (HANDED_OVER, *ORACLE, f"tracing.otlp={collected[1]}", "tracing.sample=0")
    with (
        Home(tmp_path_factory.mktemp("home")).swept() as home,
        home.cluster("configs/no-ray.yaml", *sets) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def demo_cluster(tmp_path_factory):
    """A cluster on the demo model with a chat template that takes tools, for examples and tutorials. They have the mark
    `xdist_group("demo")`, and wait until three workers are connected: a tutorial kills one.
    """
    path = tmp_path_factory.mktemp("home")
    sets = (HANDED_OVER, "log.level=debug", "decode.replicas=2", f"model.path={model_with_tools(path)}")
    with Home(path).swept() as home, home.cluster("configs/no-ray.yaml", *sets) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(module_home, request):
    """A cluster for all tests of a module, from its `CONFIG`, if any, and its `SETS`."""
    config = getattr(request.module, "CONFIG", "configs/no-ray.yaml")
    with module_home.cluster(config, *request.module.SETS) as running:
        yield running


@pytest.fixture(scope="module")
def module_home(tmp_path_factory):
    with Home(tmp_path_factory.mktemp("home")).swept() as home:
        yield home
