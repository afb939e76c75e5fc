"""Quality of answers of models/demo to the prompts of models/heldout.jsonl.

transformers judges in float32. It computes with the original weights, or with those that Baton rounds, widened again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.engine import Engine
from baton.engine.kernels.quantized import SCHEMES, Quantize, quantize
from baton.engine.kv_cache import DTYPES
from baton.engine.models.loading import load_model
from baton.engine.tp.backend import Ranking, load_sharded
from baton.tokenizer import load_tokenizer
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import markdown

if TYPE_CHECKING:
    from baton.engine.kv_cache import KVCache
    from baton.engine.model_backend import ModelBackend

DEMO, PROMPTS = ROOT / "models" / "demo", ROOT / "models" / "heldout.jsonl"
MAX_TOKENS = 32
BLOCKS = 64  # of the cache for one prompt and its answer


@cache
def prompts() -> list[tuple[int, ...]]:
    """Return the tokens of all prompts."""
    tokenizer = load_tokenizer(DEMO)
    return [tuple(tokenizer.encode(json.loads(line)["prompt"])) for line in PROMPTS.read_text().splitlines()]


def answers(backend: ModelBackend) -> list[list[int]]:
    """Return the greedy tokens of the engine for each prompt."""
    engine = Engine(backend, load_tokenizer(DEMO), total_blocks=4096)
    found = [list[int]() for _ in prompts()]
    for number, prompt in enumerate(prompts()):
        sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
        engine.submit(HandoffId(str(number), 0), SequenceSpec(prompt, sampling))
    while engine.has_work():
        for output in engine.step().outputs:
            found[int(output.key.request_id)] += [token.token_id for token in output.tokens]
    return found


class Judge(NamedTuple):
    """A model of transformers, and its greedy answers."""

    model: Any
    answers: list[list[int]]


@torch.inference_mode()
def judge(dtype: str, weights: Quantize) -> Judge:
    """Return transformers in float32 with the weights of a backend with this `dtype` and `model.quantize`."""
    from transformers import LlamaForCausalLM  # the other programs do without it

    model = LlamaForCausalLM.from_pretrained(DEMO, dtype=DTYPES[dtype]).eval()
    for module in model.modules():
        if weights != "none" and isinstance(module, torch.nn.Linear):  # its own tensor, even if it is the embedding
            rounded = quantize(module.weight, SCHEMES[weights]).widened()
            module.weight = torch.nn.Parameter(rounded, requires_grad=False)
    model.float()
    return Judge(model, [_greedy(model, prompt) for prompt in prompts()])


def _greedy(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def divergences(backend: ModelBackend, by: Judge) -> list[float]:
    """Return KL(judge || backend) in nats for each token of the judge's answers, given the tokens before it."""
    kv, found = backend.make_cache(BLOCKS), list[float]()
    for prompt, answer in zip(prompts(), by.answers, strict=True):
        tokens, first = [*prompt, *answer][:-1], len(prompt) - 1
        expected = by.model(torch.tensor([tokens])).logits[0, first:]
        logits = [line.log_softmax(-1) for line in (expected, _logits(backend, kv, tokens, first))]
        kl = torch.nn.functional.kl_div(logits[1], logits[0], reduction="none", log_target=True).sum(-1)
        found += kl.tolist()
    return found


def _logits(backend: ModelBackend, kv: KVCache, tokens: list[int], first: int) -> torch.Tensor:
    """Return the logits from position `first` on, computed in one forward."""
    size = backend.layout.block_size
    row, wanted = FixedRow(tokens, 0, list(range(BLOCKS))), list(range(first, len(tokens)))
    return backend.forward(replace(fixed_batch([row], wanted, size, backend.device), fixed=False), kv)


class Quality(NamedTuple):
    """Equal answers of 200, and the KL divergence per token and at the worst one, against one judge."""

    equal: int
    mean_kl: float
    worst_kl: float


def quality(backend: ModelBackend, found: list[list[int]], by: Judge) -> Quality:
    """Compare a backend and its answers `found`, which have no end token, with a judge."""
    each, end = divergences(backend, by), by.model.generation_config.eos_token_id
    expected = [[token for token in answer if token != end] for answer in by.answers]
    return Quality(sum(map(list.__eq__, found, expected)), mean(each), max(each))


@contextmanager
def loaded(dtype: str, weights: Quantize, ranks: int) -> Iterator[ModelBackend]:
    """Yield the backend. Ranks above 0 are processes of their own."""
    if ranks == 1:
        yield load_model(DEMO, dtype=dtype, quantize=weights)
    else:
        ranking = Ranking(ranks, threads=torch.get_num_threads())
        with closing(load_sharded(DEMO, ranking, dtype=dtype, quantize=weights)) as backend:
            yield backend


def table(dtypes: tuple[str, ...], ranks: int) -> tuple[str, dict[str, float]]:
    """Return a table with all weights in each dtype, and its figures."""
    original, lines, figures = judge("float32", "none"), list[list[str]](), dict[str, float]()
    for dtype, weights in itertools.product(dtypes, get_args(Quantize)):
        judges = {"widened": judge(dtype, weights), "original": original}
        with loaded(dtype, weights, ranks) as backend:
            found = answers(backend)
            each = {name: quality(backend, found, by) for name, by in judges.items()}
        cells = [[f"{one.equal}", f"{one.mean_kl:.1e} ({one.worst_kl:.1e})"] for one in each.values()]
        lines.append([dtype, weights, *itertools.chain(*cells)])
        figures |= {f"{dtype} {weights}: equal to {name}": float(one.equal) for name, one in each.items()}
        figures |= {f"{dtype} {weights}: KL to {name}": one.mean_kl for name, one in each.items()}
    titles = [f"{column}, {name}" for name in ("widened", "original") for column in ("equal", "KL")]
    return markdown(["model.dtype", "model.quantize", *titles], lines), figures
