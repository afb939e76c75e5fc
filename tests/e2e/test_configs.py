"""Files of configs/ that no other test here starts as they are: one question, and who had a part in the answer."""

import pytest

from tests.support.cluster_process import HANDED_OVER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("file", "workers"), [("local-2x2", 4), ("disaggregated-tp", 2)])
def test_a_file_starts_and_answers(home, file, workers):
    with home.cluster(f"configs/{file}.yaml", HANDED_OVER) as cluster, cluster.client() as client:
        answer = client.generate("The color of dog", max_tokens=8, temperature=0)
        assert (answer.text, answer.finish_reason.value) == (" can vary widely", "eos")
        loads = {worker.info.ref.worker_id: worker.load for worker in client.cluster().workers}
        assert len(loads) == workers
        assert sum(load.prefill_tokens for name, load in loads.items() if name.startswith("prefill")) > 0
        assert sum(load.decode_steps for name, load in loads.items() if name.startswith("decode")) > 0
