import psutil
import pytest
import torch

from baton.engine.kv_cache import CPU_CAP_BYTES, CPU_SHARE, Sizing, auto_kv_bytes, available_bytes, size_kv
from baton.engine.oracle import oracle_layout
from baton.errors import ConfigError

LAYOUT = oracle_layout(block_size=16)
CPU = torch.device("cpu")


def size(kv_memory, max_model_len, model_max_len=2048):
    return size_kv(LAYOUT, kv_memory=kv_memory, max_model_len=max_model_len, model_max_len=model_max_len, device=CPU)


def test_bytes_become_whole_blocks_and_auto_length_is_the_least_of_model_and_pool():
    assert size(10 * LAYOUT.block_bytes + 1, 160) == Sizing(10, 160)
    assert size(10 * LAYOUT.block_bytes, "auto") == Sizing(10, 160)
    assert size(10 * LAYOUT.block_bytes, "auto", 100) == Sizing(10, 100)


def test_auto_memory_is_a_bounded_share():
    found = size("auto", "auto").total_blocks * LAYOUT.block_bytes
    assert 0 < found <= min(CPU_CAP_BYTES, psutil.virtual_memory().total * CPU_SHARE)
    assert auto_kv_bytes(CPU) <= CPU_CAP_BYTES


@pytest.mark.parametrize(
    ("memory", "length", "words"),
    [
        (100, "auto", "kv_memory: 100 bytes are less than one block"),
        (10 * LAYOUT.block_bytes, 161, f"set at least {11 * LAYOUT.block_bytes} bytes"),
        (10 * LAYOUT.block_bytes, 4096, "between 2 and the model's 2048, got 4096"),
        (10 * LAYOUT.block_bytes, 1, "between 2 and"),
        (2**50, 160, f"kv_memory: {2**50} bytes, but cpu has [0-9]+;"),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(memory, length, words):
    with pytest.raises(ConfigError, match=words):
        size(memory, length)


@pytest.mark.parametrize(
    ("limit", "used", "wanted"), [("5000", "2000", 3000), ("5000", "6000", 0), ("max", "1", None), ("5000", None, None)]
)
def test_a_containers_limit_counts(tmp_path, limit, used, wanted):
    (tmp_path / "memory.max").write_text(limit + "\n")
    if used is not None:
        (tmp_path / "memory.current").write_text(used + "\n")
    found = available_bytes(tmp_path)
    assert found == wanted if wanted is not None else found > 5000


def test_the_cache_of_files_in_a_container_gives_way(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 4000\ninactive_file 2500\nactive_file 1000\nshmem 500\n")
    assert available_bytes(tmp_path) == 3500
