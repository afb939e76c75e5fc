"""Multi-token prediction as a drafter: the head equals its equations, and proposals change no stream."""

import random
from dataclasses import replace

import pytest
import torch

from baton.core import KVLayout
from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kv_cache import KVCache
from baton.engine.models.loading import load_model
from baton.engine.speculation.prediction import KEPT, PredictionModel
from baton.errors import ConfigError
from baton.worker.engine_factory import generate
from tests.support import weight_formats as formats
from tests.support.engines import BLOCK, Streams, arriving, engine_of, hand_over, key_of, move, numbers, run, spec_of
from tests.unit.engine.test_speculation import Everything, mixed_spec, speculating
from tests.unit.model.checkpoints import LATENT, edit_config, edit_tensors, parameter_of, random_checkpoint

LAYERS, WORDS, HEAD = 2, 257, "model.layers.2."
EXACT = FixedShapes(rows=4, tokens=8, ragged=True)


def checkpoint(folder, kind="v3-yarn", **changed):
    """Write a checkpoint whose last layer is for multi-token prediction. Return all its layers in transformers."""
    shape = LATENT[kind].settings | {"num_hidden_layers": LAYERS + 1, "vocab_size": WORDS} | changed
    model, generator = random_checkpoint(folder, "deepseek_v3", **shape), torch.Generator().manual_seed(7)
    hidden = model.config.hidden_size
    tensors = {"eh_proj": torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[name] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    copies = {"embed_tokens": torch.zeros(WORDS, hidden), "shared_head.head": torch.zeros(WORDS, hidden)}
    edit_tensors(folder, lambda all_: all_.update({f"{HEAD}{n}.weight": t for n, t in (tensors | copies).items()}))
    edit_config(folder, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    return model, tensors


def loaded(folder, **options):
    return load_model(folder, block_size=BLOCK, max_model_len=256, predicts=True, **options)


def normed(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Equations:
    """Section 2.2 of the report, whole sequences without a cache. `layer` is of transformers."""

    def __init__(self, model, tensors):
        self.model, self.tensors, self.eps = model, tensors, model.config.rms_norm_eps

    def block(self, number, x, positions):
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(x[None], positions[None])
        layer = self.model.model.layers[number]
        return layer(x[None], attention_mask=mask, position_ids=positions[None], position_embeddings=rotation)[0]

    @torch.inference_mode()
    def states(self, tokens):
        """Return the rows behind the last norm of the model: [n, hidden]."""
        x = self.model.model.embed_tokens(torch.tensor(tokens))
        for number in range(LAYERS):
            x = self.block(number, x, torch.arange(len(tokens)))
        return self.model.model.norm(x)

    @torch.inference_mode()
    def predict(self, rows, tokens, first):
        """Return logits and rows for h_first, ... and the tokens behind them."""
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        parts = normed(embedded, self.tensors["enorm"], self.eps), normed(rows, self.tensors["hnorm"], self.eps)
        x = torch.cat(parts, -1) @ self.tensors["eh_proj"].T
        x = self.block(LAYERS, x, torch.arange(first, first + len(x)))
        x = normed(x, self.tensors["shared_head.norm"], self.eps)
        return self.model.lm_head(x), x

    def proposals(self, tokens, first, count):
        """Return greedy proposals behind `tokens` if rows from `first` on are there."""
        rows, known, found = self.states(tokens)[first:-1], list(tokens[first + 1 :]), []
        for _ in range(count):
            logits, out = self.predict(rows, known, first)
            found.append(int(logits[-1].argmax()))
            rows, known = torch.cat((rows, out[-1:])), [*known, found[-1]]
        return found


@pytest.mark.parametrize("kind", ["v3", "v3-yarn", "v3-plain", "v3-dense"])
def test_the_head_equals_its_equations(tmp_path, kind):
    reference = Equations(*checkpoint(tmp_path, kind))
    backend, rng = loaded(tmp_path), random.Random(1)
    tokens, first = numbers(rng, 24), 9
    rows = reference.states(tokens)[first:-1]
    right, out = reference.predict(rows, tokens[first + 1 :], first)
    layout = KVLayout(1, 1, backend.layout.head_dim, BLOCK, "float32", ("latent",))
    kv, blocks, got = KVCache(layout, 8), list(range(8)), []
    for begin, end in ((0, 6), (6, 7), (7, len(rows))):  # a prompt, one row, and several behind them
        new = FixedRow(list(tokens[first + 1 + begin : first + 1 + end]), begin, blocks)
        batch = fixed_batch([new], list(range(end - begin)), BLOCK, torch.device("cpu"))
        batch = replace(batch, fixed=False, positions=torch.arange(first + begin, first + end))
        logits, last = backend.prediction.forward(batch, rows[begin:end].clone(), kv)
        got.append((logits.clone(), last.clone()))
    for place, whole in enumerate((right, out)):
        torch.testing.assert_close(torch.cat([each[place] for each in got]), whole, atol=2e-4, rtol=2e-4)


def test_a_head_is_no_part_of_the_fingerprint_and_is_needed(tmp_path):
    checkpoint(tmp_path)
    plain = load_model(tmp_path, block_size=BLOCK, max_model_len=256)
    assert loaded(tmp_path).fingerprint == plain.fingerprint
    assert plain.prediction is None
    edit_tensors(tmp_path, lambda all_: [all_.pop(name) for name in list(all_) if name.startswith(HEAD)])
    with pytest.raises(ConfigError, match=r"^decode.speculation: mtp .* multi-token .*layers.2.eh_proj.weight"):
        loaded(tmp_path)


def test_a_quantised_model_has_a_quantised_layer(tmp_path):
    reference, backend = Equations(*checkpoint(tmp_path, "v3")), loaded(tmp_path, quantize="int8")
    engine, drafter = predicting(backend)
    asked = spec_of(numbers(random.Random(2), 11), max_tokens=14)
    right = generate(engine_of(backend, 100), asked)
    assert [t.token_id for t in generate(engine, asked).tokens] == [t.token_id for t in right.tokens]
    first = [(found[0], reference.proposals(tokens, 11, 1)[0]) for tokens, found in drafter.asked if found]
    assert sum(mine == whole for mine, whole in first) >= len(first) * 0.6, "rounded weights change few proposals"


def test_the_layer_of_an_fp8_checkpoint_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    shape = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32}
    model, own = checkpoint(tmp_path, "v3", **shape)

    def quantise(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            found, values = formats.fp8(tensors.pop(name), block=[16, 32])
            tensors.update({name.removesuffix("weight") + part: each for part, each in found.items()})
            if name.startswith(f"{HEAD}eh_proj"):
                own["eh_proj"] = values
            else:
                parameter_of(model, name).copy_(values)

    edit_tensors(tmp_path, quantise)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 32]})
    reference, backend = Equations(model, own), loaded(tmp_path)
    engine, drafter = predicting(backend)
    run(engine, [spec_of(numbers(random.Random(2), 11), max_tokens=9)])
    assert drafter.asked
    assert all(found == reference.proposals(tokens, 11, len(found)) for tokens, found in drafter.asked)


class Watched(PredictionModel):
    """Keeps what it was asked and proposed, and the first row of each source."""

    def __init__(self, backend):
        super().__init__(backend, backend.prediction)
        self.asked = []

    def propose(self, sources, counts):
        found = super().propose(sources, counts)
        self.asked += [(list(source.tokens), each) for source, each in zip(sources, found, strict=True)]
        return found


def predicting(backend, drafter=None, total_blocks=400, **options):
    drafter = drafter or Watched(backend)
    left = drafter.reserve(total_blocks, backend.layout)
    return speculating(backend, drafter, total_blocks=left, **options), drafter


def test_proposals_are_those_of_the_equations_while_some_are_rejected(tmp_path):
    """The first row is that of the first decode step. The head is random, so its proposals are wrong."""
    reference, backend = Equations(*checkpoint(tmp_path)), loaded(tmp_path)
    engine, drafter = predicting(backend)
    prompt = numbers(random.Random(2), 11)
    run(engine, [spec_of(prompt, max_tokens=14)])
    assert len(drafter.asked) >= 5
    for tokens, found in drafter.asked:
        assert found == reference.proposals(tokens, len(prompt), len(found))
    assert max(len(found) for _, found in drafter.asked) > 8
    assert sorted(drafter._free) == list(range(len(drafter._free))), "ended sequences leave no blocks behind"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_streams_with_a_head_are_those_without(tmp_path, number):
    """Log-probabilities may differ in their last bits, because latent attention rounds by the number of rows."""
    checkpoint(tmp_path)
    rng, backend = random.Random(number), loaded(tmp_path)
    specs = [mixed_spec(rng, i, deterministic=number % 2 == 1 and rng.random() < 0.3) for i in range(9)]
    alone = [generate(engine_of(backend, 100, shapes=EXACT), spec) for spec in specs]
    engine, _ = predicting(
        backend,
        total_blocks=rng.choice([40, 400]),
        prefix_cache=rng.random() < 0.5,
        max_running=rng.choice([2, 8]),
        shapes=EXACT,
    )
    streams = arriving(engine, specs)
    for i, right in enumerate(alone):
        found = streams.tokens[key_of(i)]
        assert [(t.token_id, t.text) for t in found] == [(t.token_id, t.text) for t in right.tokens]
        ends = streams.finishes[key_of(i)], right.finish
        assert replace(ends[0], logprobs=None) == replace(ends[1], logprobs=None)
        scores = [[t.logprobs.logprob if t.logprobs else 0.0 for t in each] for each in (found, right.tokens)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert engine.counters.speculated_tokens > 0
    assert engine.pool.counts().owned == 0


# --- a model of which the head is right -------------------------------------------------------------------------------


def successors(folder, wired="hidden"):
    """Write a model whose next token is a fixed successor of the last one. The head predicts the one behind that, from
    the row of position i (`hidden`) or from the token i + 1 (`token`). All layers add nothing.
    """
    checkpoint(folder, "v3-dense", hidden_size=WORDS + 7, tie_word_embeddings=False)
    order = list(range(WORDS))
    random.Random(3).shuffle(order)
    after = {order[i]: order[(i + 1) % WORDS] for i in range(WORDS)}
    embed, head, step = torch.eye(WORDS, WORDS + 7), torch.zeros(WORDS, WORDS + 7), torch.zeros(WORDS + 7, WORDS + 7)
    for token, successor in after.items():
        head[successor, token] = step[successor, token] = 1.0
    own, zeros = torch.eye(WORDS + 7), torch.zeros(WORDS + 7, WORDS + 7)
    pair = (zeros, step) if wired == "hidden" else (own, zeros)

    def change(tensors):
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            if name.endswith(("model.norm.weight", "enorm.weight", "hnorm.weight", "head.norm.weight")):
                tensor.fill_(1.0)
        tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = embed.clone(), head
        tensors[f"{HEAD}eh_proj.weight"] = torch.cat(pair, 1).contiguous()

    edit_tensors(folder, change)
    return after


class Miswired(Watched):
    """Takes the row of another position."""

    def computed(self, sources, counts):
        self._head.model.hidden = self._head.model.hidden.roll(1, 0) if sum(counts) > 1 else self._head.model.hidden * 0
        super().computed(sources, counts)


@pytest.mark.parametrize(("wired", "temperature"), [("hidden", 0.0), ("hidden", 0.05), ("token", 0.0), ("token", 8.0)])
def test_a_head_that_predicts_well_is_accepted(tmp_path, wired, temperature):
    """At temperature 8, most tokens are no successors, and only the same noise makes the proposals the draws."""
    after = successors(tmp_path, wired)
    backend, asked = loaded(tmp_path), spec_of([5], max_tokens=66, temperature=temperature, seed=4)
    engine, _ = predicting(backend)
    found = run(engine, [asked]).ids(key_of(0))
    assert found == [t.token_id for t in generate(engine_of(backend, 100), asked).tokens]
    follow = sum(after[first] == second for first, second in zip([5, *found], found, strict=False))
    assert follow < 33 if temperature > 1 else follow == 66
    assert engine.counters.accepted_tokens == engine.counters.speculated_tokens > 55
    assert engine.counters.decode_steps <= 6


@pytest.mark.slow
def test_a_head_with_rows_of_other_positions_is_not_accepted(tmp_path):
    successors(tmp_path)
    backend, asked = loaded(tmp_path), spec_of([5], max_tokens=66)
    engine, _ = predicting(backend, Miswired(backend))
    right = generate(engine_of(backend, 100), asked)
    assert [t.token_id for t in generate(engine, asked).tokens] == [t.token_id for t in right.tokens]
    assert engine.counters.accepted_tokens < engine.counters.speculated_tokens / 10


def test_a_handed_over_and_moved_sequence_is_predicted_from_its_first_step(tmp_path):
    successors(tmp_path)
    backend, asked = loaded(tmp_path), spec_of(max_tokens=60, temperature=0.02, seed=3)
    right = [t.token_id for t in generate(engine_of(backend, 100), asked).tokens]
    receiver, _ = predicting(backend)
    assert hand_over(engine_of(backend, 100), receiver, asked).ids(key_of()) == right
    assert receiver.counters.accepted_tokens > 20
    sender, receiver = (predicting(backend)[0] for _ in range(2))
    assert move(sender, receiver, asked, 3, 2).ids(key_of()) == right
    assert receiver.counters.accepted_tokens == receiver.counters.speculated_tokens > 10


def test_rows_that_are_missing_or_too_many_only_make_proposals_worse(tmp_path):
    """Steps with prompt chunks compute rows that the head does not get. Long pauses of proposals leave rows unread."""

    class Seldom(Everything):
        asked = 0

        def counts(self, each, possible, rows):
            self.asked += 1
            return super().counts(each, possible, rows) if self.asked > KEPT + 20 else [0] * len(each)

    successors(tmp_path)
    backend = loaded(tmp_path)
    specs = [spec_of([i], max_tokens=110) for i in (5, 9)]
    right = [[t.token_id for t in generate(engine_of(backend, 100), spec).tokens] for spec in specs]
    engine, _ = predicting(backend, control=Seldom())
    streams = Streams()
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
        for _ in range(9):
            streams.step(engine)
    streams.drain(engine)
    assert [streams.ids(key_of(number)) for number in range(2)] == right
    assert engine.counters.accepted_tokens == engine.counters.speculated_tokens > 20
