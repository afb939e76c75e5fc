"""Which GPUs each worker of a host uses, and plans that do not fit. All counts are given; no GPU is here."""

from pathlib import Path

import pytest

from baton.cluster.gpus import VISIBLE, GpuAssignment, check_gpus, gpu_pools, narrow, visible_gpus, with_devices
from baton.config import ClusterConfig, load_config
from baton.core import Role
from baton.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
EIGHT = tuple("01234567")
P, D = Role.PREFILL, Role.DECODE


def plan(prefill="cuda", decode="cuda", ray="none", **more):
    tree = {"model": {"path": "models/demo"}, "ray": {"address": ray}}
    pools = {"prefill": {"device": prefill}, "decode": {"device": decode}}
    for key, value in more.items():  # prefill_replicas=2
        pool, _, name = key.partition("_")
        pools[pool][name] = value
    return ClusterConfig.model_validate(tree | pools)


@pytest.mark.parametrize(
    ("count", "listed", "found"),
    [
        (0, None, ()),
        (2, None, ("0", "1")),
        (2, "3, 1", ("3", "1")),
        (1, "3,99,1", ("3",)),  # CUDA stops at the first entry that it cannot use
        (2, "GPU-8932f937,GPU-1c2b", ("GPU-8932f937", "GPU-1c2b")),
        (1, "MIG-a1,MIG-b2,MIG-c3", ("MIG-a1", "MIG-b2", "MIG-c3")),
        (0, "", ()),
        (0, "-1", ()),
        (0, "MIG-a1", ()),  # torch without CUDA
    ],
)
def test_entries_of_the_variable_are_kept_as_they_are(count, listed, found):
    """`count` is that of `torch.cuda.device_count`, torch 2.13: NVML's, else `cudaGetDeviceCount` (1 for MIG)."""
    assert visible_gpus(count, {} if listed is None else {VISIBLE: listed}) == found


def assigned(config, gpus, *workers):
    table = GpuAssignment(config, gpus)
    return [table.take(f"{role.value}-{number}", role) for role, number in workers]


TWO_EACH = (P, 0), (P, 1), (D, 0), (D, 1)


@pytest.mark.parametrize(
    ("config", "gpus", "expected"),
    [
        (plan(), ("GPU-a", "MIG-b", "7", "9"), [("GPU-a",), ("MIG-b",), ("7",), ("9",)]),
        (plan("auto", "auto"), tuple("0123"), [("0",), ("1",), ("2",), ("3",)]),
        (plan("auto", "auto"), (), [()] * 4),
        (plan("cpu", "cuda"), tuple("01"), [(), (), ("0",), ("1",)]),
        (plan("cuda:0", "cuda:0", prefill_replicas=2, decode_replicas=2), tuple("01"), [("0",), ("1",)] * 2),
        (plan("cuda:1", "cuda:3", prefill_replicas=2, decode_replicas=2), "abcde", [("b",), ("c",), ("d",), ("e",)]),
        (plan(prefill_tensor_parallel=3), tuple("01234567"), [tuple("012"), tuple("345"), ("6",), ("7",)]),
    ],
    ids=["cuda", "auto", "auto without GPUs", "one pool on CPUs", "shared", "from N on", "tensor parallel"],
)
def test_each_worker_has_its_gpus(config, gpus, expected):
    assert assigned(config, gpus, *TWO_EACH) == expected


def test_workers_of_named_tensor_parallel_pools_have_the_groups_from_n_on():
    config = plan("cuda:2", "cuda:0", prefill_tensor_parallel=2, prefill_replicas=3, decode_replicas=2)
    found = assigned(config, EIGHT, (P, 0), (P, 1), (P, 2), (D, 0), (P, 3))
    assert found == [("2", "3"), ("4", "5"), ("6", "7"), ("0",), ("2", "3")], "one above plan shares with its own pool"


def test_a_gpu_is_free_again_when_it_is_given_back():
    table = GpuAssignment(plan(), ("0", "1"))
    assert (table.take("prefill-0", P), table.take("decode-0", D)) == (("0",), ("1",))
    assert table.take("decode-1", D) is None
    table.give_back("prefill-0")
    assert table.take("decode-1", D) == ("0",)
    table.give_back("of a CPU, or unknown")


def test_a_gpu_of_a_worker_that_changed_its_role_is_not_the_first_to_be_shared():
    table = GpuAssignment(plan("cuda:0", "cuda:0", prefill_replicas=2, decode_replicas=2), ("0", "1"))
    for worker_id, role in (("prefill-0", P), ("prefill-1", P), ("decode-0", D), ("decode-1", D)):
        table.take(worker_id, role)
    table.give_back("prefill-1")  # then decode-1 became a prefill worker
    assert table.take("decode-2", D) == ("1",)


REFUSED = [
    (plan(), 1, "prefill.device: cuda and decode.device: cuda: prefill.replicas 1 x prefill.tensor_parallel 1 and"),
    (plan(), 1, "need 2 GPUs, and this host has 1 that torch can use; lower these numbers, write cuda:N in both pools"),
    (plan("cuda", "cpu"), 0, "prefill.device: cuda: prefill.replicas 1 x prefill.tensor_parallel 1 need 1 GPUs"),
    (plan("auto", "auto"), 1, "prefill.device: auto and decode.device: auto: prefill.replicas 1"),
    (plan(decode_autoscale={"min": 1, "max": 8}), 8, "decode.autoscale.max 8 x decode.tensor_parallel 1 need 9 GPUs"),
    (plan(decode_tensor_parallel=8), 8, "decode.replicas 1 x decode.tensor_parallel 8 need 9 GPUs"),
    (plan("cuda:0", "cuda:5", decode_replicas=4), 8, "decode.device: cuda:5: decode.replicas 4 x decode.tensor"),
    (plan("cuda:0", "cuda:5", decode_replicas=4), 8, "need the GPUs 5 to 8, and this host has 8 that torch can use"),
    (plan("cuda:1", "cuda:1"), 1, "prefill.device: cuda:1: prefill.replicas 1 x"),
    (plan("cuda:0", "cuda"), 8, "prefill.device: cuda:0 and decode.device: cuda: must be cuda:N in both pools"),
    (plan("auto", "cuda:0"), 8, "prefill.device: auto and decode.device: cuda:0: must be cuda:N in both pools"),
    (plan("cuda:0", "cuda:0", ray="h:1"), 0, "Ray at ray.address 'h:1' chooses the GPUs; must be cuda, auto or cpu"),
]


@pytest.mark.parametrize(("config", "gpus", "text"), REFUSED)
def test_a_plan_that_does_not_fit_is_refused_with_its_fields_and_numbers(config, gpus, text):
    with pytest.raises(ConfigError) as refused:
        check_gpus(config, tuple(map(str, range(gpus))))
    assert text in str(refused.value)


FITS = [
    (plan(), 2),
    (plan("auto", "auto"), 0),
    (plan("cpu", "cpu"), 0),
    (plan("cuda:0", "cuda:0"), 1),
    (plan("cuda:3", "cpu"), 4),
    (plan(ray="h:6379"), 0),  # its hosts are not known here, and may join later
    (ClusterConfig.model_validate({"model": {"path": "oracle"}}), 1),  # computes on the CPU
    (plan("auto", "cuda:0").model_copy(update={"mode": "colocated"}).by_mode(), 2),
]


@pytest.mark.parametrize(("config", "gpus"), FITS)
def test_a_plan_that_fits_is_accepted(config, gpus):
    check_gpus(config, tuple(map(str, range(gpus))))


def test_the_example_of_eight_gpus_fits_eight_and_not_seven():
    config = load_config(CONFIGS / "single-node-8gpu.yaml", ["model.path=oracle"])
    check_gpus(config, EIGHT)
    assert assigned(config, EIGHT, (P, 0), (D, 0)) == [tuple("0123"), tuple("4567")]
    with pytest.raises(ConfigError, match="need 8 GPUs, and this host has 7"):
        check_gpus(config, EIGHT[:7])


def test_workers_see_only_their_own_gpus_so_their_config_has_no_index():
    config = with_devices(plan("cuda:2", "cuda:4"), EIGHT)
    assert (config.prefill.device, config.decode.device) == ("cuda", "cuda")
    config = with_devices(plan("auto", "cpu"), EIGHT)
    assert (config.prefill.device, config.decode.device) == ("cuda", "cpu")
    assert with_devices(plan("auto", "auto"), ()).decode.device == "cpu"
    assert with_devices(plan("auto", "cuda", ray="auto"), ()).prefill.device == "auto"


@pytest.mark.parametrize(("listed", "shown"), [(None, "2,3"), ("4,GPU-x,5,6,7", "5,6")])
def test_a_worker_that_is_started_by_hand_hides_all_other_gpus(listed, shown):
    environ = {} if listed is None else {VISIBLE: listed}
    config = narrow(plan("cuda:2", "cuda:0", prefill_tensor_parallel=2), P, environ)
    assert environ == {VISIBLE: shown}
    assert (config.prefill.device, config.decode.device) == ("cuda", "cuda")
    assert narrow(config, P, environ) == config, "it is done once"


def test_a_worker_that_is_started_by_hand_with_too_few_gpus_is_refused():
    with pytest.raises(ConfigError, match=r"decode.device: cuda:1: .* need GPU 1, and this host has 1"):
        narrow(plan("cpu", "cuda:1", decode_replicas=5), D, {VISIBLE: "6"})


def test_only_pools_that_may_use_gpus_are_counted():
    assert set(gpu_pools(plan("cpu", "auto"), 1)) == {D}
    assert not gpu_pools(plan("auto", "auto"), 0)
