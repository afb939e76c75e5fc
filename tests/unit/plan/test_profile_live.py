"""What `baton profile --live` makes of what it saw; that it sees anything is tested on a real cluster (tests/e2e)."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.profile_fitted import fitted
from baton.cli.profile_live import one_size
from baton.cli.profile_seen import Measured, Prompts, Seen, together
from baton.config import ClusterConfig
from baton.core import Role
from baton.errors import ConfigError, NoWorker
from baton.load import Pace
from simulator.profile_fit import Gaps, Steps, seconds_of
from tests.unit.plan.plan_support import cluster

SINGLE = {
    16: [Prompts(16, (Seen(0.0, [0.012, 0.03]),), Pace(1, 16, 136, 0.01))],
    64: [Prompts(64, (Seen(0.0, [0.022, 0.04]),), Pace(1, 64, 2080, 0.02))],
}
SEEN = Measured(
    single=SINGLE,
    together={(1, 16): [Gaps(1, 40, (0.01, 0.011))], (2, 16): [Gaps(2, 80, (0.012,))]},
    busy=[Gaps(4, 160, (0.013,))],
)


def test_kv_is_that_of_the_whole_model_and_of_a_worker_that_decodes():
    found = fitted(SEEN, cluster((Role.PREFILL, 10), (Role.DECODE, 30)), 4, "here")
    assert found.token_bytes == 3 * 2 * 2 * 8 * 2
    assert (found.layouts[0].tensor_parallel, found.layouts[0].kv_tokens) == (4, 30 * 16)
    assert fitted(SEEN, cluster((Role.DECODE, 20)), 1, "here").layouts[0].kv_tokens == 20 * 16
    with pytest.raises(NoWorker):
        fitted(SEEN, cluster(), 1, "here")


def test_workers_that_do_both_slow_each_other_as_much_as_one_alone_is_faster():
    """Two of them decoded at 12 ms for one row each, one alone at 10 ms."""
    seen = Measured(
        single=SINGLE,
        together={(1, 16): [Gaps(1, 40, (0.012, 0.012))], (2, 16): [Gaps(2, 80, (0.0168, 0.0192))]},
        busy=[Gaps(1, 40, (0.010, 0.012))],  # while another one computed prompts
        busy_prompts=[Pace(2, 128, 4160, 0.06)],
        alone=[Gaps(1, 40, (0.009, 0.011))],
        joint=Pace(1, 64, 2080, 1.5 * 0.021 + 1.2 * 0.015),
        beside=Pace(1, 2, 80, 0.0),
    )
    (layout,) = fitted(seen, cluster((Role.DECODE, 30)), 1, "here").layouts
    assert layout.host_workers == 1
    assert layout.beside_decode is not None
    assert (layout.beside_decode.factor, layout.beside_prompts.factor) == pytest.approx((1.2, 1.1))
    assert layout.beside_prompts.spread != layout.spread
    assert seconds_of(layout.decode[0], Steps(1, 40, 0.0)) == pytest.approx(0.010)
    assert seconds_of(layout.decode[-1], Steps(2, 80, 0.0)) == pytest.approx(0.015)
    assert (min(layout.spread), max(layout.spread)) == pytest.approx((0.9, 1.1), rel=0.01)
    assert layout.busy_prompt == pytest.approx(1.5, rel=0.01)
    new = layout.prompt.token_s * 64 + layout.prompt.context_s * 2080
    assert layout.joint_extra_s == pytest.approx(0.021 - new), "without what the other one cost it"


def test_a_profile_is_of_one_size():
    two = {"model": {"path": "oracle"}, "decode": {"tensor_parallel": 2}}
    with pytest.raises(ConfigError, match=r"prefill.tensor_parallel: must be .* which is 2: .* one size, got 1"):
        one_size(ClusterConfig.model_validate(two))
    for more in ({"prefill": {"tensor_parallel": 2}}, {"mode": "colocated"}):
        assert one_size(ClusterConfig.model_validate(two | more)) == 2


@pytest.mark.parametrize(("args", "got"), [(("--set", "a=b"), "--set a=b"), (("-c", "x.yaml"), "-c x.yaml")])
def test_a_running_cluster_is_as_it_is(args, got):
    done = CliRunner().invoke(app, ["profile", "--live", "p.json", *args])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).endswith(f"got {got}")


def test_only_gaps_in_which_all_decoded_count():
    """The second begins at 1.0 and ends at 1.3: what came before and after was decoded with fewer rows."""
    first = Seen(0.0, [0.1, 0.2, 1.0, 1.1, 1.2, 1.3, 9.0])
    second = Seen(0.0, [1.0, 1.1, 1.2, 1.3])
    gaps = together([first, second], rows=2, length=16)
    assert gaps.seconds == pytest.approx([0.1] * 5)
    assert (gaps.rows, gaps.context) == (2, 2 * (16 + 5.5 / 2))
    never_met = together([Seen(0.0, [0.1, 0.2]), Seen(0.0, [5.0, 5.3])], rows=2, length=16)
    assert never_met.seconds == pytest.approx([0.1, 0.3])
