"""`baton quantize --compare`: figures are those of transformers, and mistakes are found before anything is written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.cli.setup import quantised_quality as quality
from baton.cli.setup.quantize import Bits, quantize
from baton.errors import ConfigError
from tests.unit.engine.test_determinism import DEMO

LINES = (Path(DEMO).parent / "heldout.jsonl").read_text().splitlines()
TEXT = "\n".join(json.loads(line)["prompt"] for line in LINES[:60])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def as_float32(folder: Path, sharper: float) -> Path:
    """Copy the demo model in float32, with logits that are `sharper` times as large."""
    shutil.copytree(DEMO, folder)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"] *= sharper
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


@torch.inference_mode()
def judged(folder: Path, piece: list[int]) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder)(torch.tensor([piece])).logits[0].log_softmax(-1)


def test_figures_are_those_of_transformers(tmp_path: Path, text: Path):
    one, two = as_float32(tmp_path / "one", 1.0), as_float32(tmp_path / "two", 1.25)
    pieces = quality.pieces_of(text, one)
    assert len(pieces) > 1
    pairs = [(judged(one, piece), judged(two, piece)) for piece in pieces]
    each = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs])
    found = quality.compare_checkpoints(one, two, pieces)
    assert found.tokens == len(each) == sum(map(len, pieces))
    assert (found.mean_kl, found.worst_kl) == pytest.approx((float(each.mean()), float(each.max())), rel=1e-3)
    assert found.agreement == 1.0  # a factor changes no order
    assert quality.compare_checkpoints(one, one, pieces) == (found.tokens, 0.0, 0.0, 1.0)


def test_the_command_prints_them(tmp_path: Path, text: Path, capsys):
    quantize(Path(DEMO), tmp_path / "copy", Bits.int4, text)
    printed = capsys.readouterr().out.splitlines()[-1]
    pieces = quality.pieces_of(text, Path(DEMO))
    found = quality.compare_checkpoints(Path(DEMO), tmp_path / "copy", pieces)
    assert printed == f"{text}: {found}"
    assert 0 < found.mean_kl < found.worst_kl
    assert found.agreement < 1


@pytest.mark.parametrize(("content", "problem"), [(None, "cannot be read"), (b"\xff", "UTF-8"), (b"", "no text")])
def test_mistakes_are_found_before_anything_is_written(tmp_path: Path, content: bytes | None, problem: str):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--compare {text}.*{problem}"):
        quantize(Path(DEMO), tmp_path / "copy", Bits.int8, text)
    assert not (tmp_path / "copy").exists()
