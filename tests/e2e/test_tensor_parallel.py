"""Clusters whose pools have different tensor-parallel sizes, on the demo model: answers, and a rank's death."""

import shutil
from pathlib import Path

import psutil
import pytest

from baton.core import Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from baton.worker.engine_factory import generate
from tests.support.cluster_process import HANDED_OVER
from tests.support.waiting import eventually
from tests.unit.model.checkpoints import RECURRENT

pytestmark = pytest.mark.slow
DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPTS = ("The color of dog", "What is the largest ocean?", "The days of the week are " * 30)
TOKENS = 24


@pytest.fixture(scope="module")
def alone():
    return answers_of(DEMO)


def answers_of(folder):
    """Return the answers of one process."""
    engine = Engine(load_model(folder), load_tokenizer(folder), total_blocks=64)
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    specs = [SequenceSpec(tuple(engine.tokenizer.encode(prompt)), sampling) for prompt in PROMPTS]
    return [generate(engine, spec).text for spec in specs]


def answers(cluster):
    with cluster.client() as client:
        made = [client.generate(p, max_tokens=TOKENS, temperature=0, ignore_eos=True) for p in PROMPTS]
    assert {answer.placement.transport for answer in made} == {"shm"}
    return [answer.text for answer in made]


def followers(cluster):
    """Return the processes of each worker's ranks above 0."""
    return {name: psutil.Process(cluster.pid(name)).children() for name in ("prefill-0", "decode-0")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("config", "prefill", "decode"), [("no-ray", 2, 4), ("disaggregated-tp", 2, 1)], ids=["to more ranks", "to fewer"]
)
def test_pools_of_different_sizes_answer_as_one_process(home, alone, config, prefill, decode):
    sizes = (f"prefill.tensor_parallel={prefill}", f"decode.tensor_parallel={decode}") if config == "no-ray" else ()
    with home.cluster(f"configs/{config}.yaml", HANDED_OVER, *sizes) as cluster:
        assert answers(cluster) == alone
        assert [1 + len(children) for children in followers(cluster).values()] == [prefill, decode]
        if decode == 1:  # only once, where the fewest processes restart
            _the_whole_worker_is_replaced_when_one_of_its_ranks_dies(cluster, alone)
        left = [child for children in followers(cluster).values() for child in children]
    assert not [child for child in left if child.is_running()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "prefill", "decode"), [("qwen3_5", 1, 2), ("granite-hybrid", 2, 1)])
def test_a_state_travels_between_pools_of_different_sizes(home, tmp_path, name, prefill, decode):
    folder = tmp_path / "model"
    RECURRENT[name].write(folder, vocab_size=2048)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / part, folder / part)
    sizes = f"prefill.tensor_parallel={prefill}", f"decode.tensor_parallel={decode}"
    model = f"model.path={folder}", "model.max_model_len=auto"
    with home.cluster("configs/no-ray.yaml", HANDED_OVER, *model, *sizes) as cluster:
        assert answers(cluster) == answers_of(folder)


def _the_whole_worker_is_replaced_when_one_of_its_ranks_dies(cluster, alone):
    (struck,) = followers(cluster)["prefill-0"]
    worker = struck.ppid()
    struck.kill()
    cluster.wait_replaced("prefill-0", worker)
    eventually(lambda: "prefill-0" in cluster.connected(), within_s=60)
    assert answers(cluster) == alone
    assert struck.pid not in {child.pid for child in followers(cluster)["prefill-0"]}
