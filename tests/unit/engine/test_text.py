import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.core import Sampling, SequenceSpec
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.sampling.output import OutputFactory, OutputText, bad_words_of
from baton.tokenizer import OracleTokenizer, load_tokenizer
from tests.support import engines
from tests.unit.engine.test_determinism import DEMO

CORPUS = [
    "the quick brown fox jumps over ünïcödé dogs, 日本語 テキスト, 😀😃 and Ελλάδα: hello world stop </s> END\n\n"
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE tokenizer in which a character can take several tokens."""
    folder = tmp_path_factory.mktemp("bpe")
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    raw.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=["bpe", "oracle"])
def tokenizer(request):
    return OracleTokenizer() if request.param == "oracle" else request.getfixturevalue("bpe")


def final_texts(tokenizer, ids):
    """Return the final text after each token, by decoding everything again each time."""
    texts = [""]
    for n in range(1, len(ids) + 1):
        texts.append(
            tokenizer.decode(ids[:n]).rstrip("\ufffd")
        )  # an incomplete character waits, the text before it not
    return texts


def naive(tokenizer, ids, stop, min_tokens):
    """Return (text, matched, tokens used) by looking at every prefix of the whole text."""
    texts = final_texts(tokenizer, ids)
    for number in range(max(1, min_tokens), len(ids) + 1):
        for end in range(len(texts[number - 1]) + 1, len(texts[number]) + 1):
            matches = [s for s in stop if texts[number][:end].endswith(s)]
            if matches:
                longest = max(matches, key=len)
                return texts[number][: end - len(longest)], longest, number
    return tokenizer.decode(ids), None, len(ids)


def run(tokenizer, ids, stop, min_tokens):
    """Return (pieces, matched, tokens used, tail) of the class under test."""
    output, pieces = OutputText(tokenizer.stream([]), stop, min_tokens), []
    for number, token in enumerate(ids, 1):
        piece, matched = output.push(token)
        pieces.append(piece)
        if matched is not None:
            return pieces, matched, number, ""
    return pieces, None, len(ids), output.tail()


texts = st.text(st.sampled_from("abé日😀 <\n"), max_size=24)
stops = st.lists(st.text(st.sampled_from("abé日😀 <"), min_size=1, max_size=4), max_size=3)


@settings(max_examples=300)
@given(st.data(), texts, stops, st.integers(0, 8))
def test_equals_decoding_everything(tokenizer, data, text, stop, min_tokens):
    ids = tokenizer.encode(text)
    if text:
        cut = data.draw(st.integers(0, len(text) - 1))
        stop.append(text[cut : cut + data.draw(st.integers(1, 5))])
    pieces, matched, used, tail = run(tokenizer, ids, stop, min_tokens)
    assert ("".join(pieces) + tail, matched, used) == naive(tokenizer, ids, stop, min_tokens)


@settings(max_examples=150)
@given(st.integers(0, 2**32), stops)
def test_nothing_given_out_is_taken_back_and_nothing_is_held_without_need(tokenizer, seed, stop):
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 25))]
    whole, _, used = naive(tokenizer, ids, stop, 0)
    pieces, _, _, tail = run(tokenizer, ids, stop, 0)
    assert "".join(pieces) + tail == whole
    seen, output, finals = "", OutputText(tokenizer.stream([]), stop), final_texts(tokenizer, ids)
    for number, token in enumerate(ids[:used], 1):
        piece, matched = output.push(token)
        seen += piece
        assert whole.startswith(seen)
        if matched is None:
            held = finals[number][len(seen) :]
            assert not held or any(s.startswith(held) and s != held for s in stop)


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [(["abcd", "bc"], "a", "bc"), (["bc", "abc"], "", "abc"), (["d", "ab"], "", "ab"), (["x", "cd"], "ab", "cd")],
)
def test_the_first_complete_match_wins_and_the_longest_of_those(stop, text, matched):
    stream = SimpleNamespace(push=lambda token_id: "abcde", flush=lambda: "")
    assert OutputText(stream, stop).push(0) == (text, matched)


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_stops_and_special_tokens_are_shown_only_if_asked_for(tmp_path, includes, special):
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>", "<pad>"]))
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    tokenizer = load_tokenizer(tmp_path)
    sampling = Sampling(
        max_tokens=99, stop=("END",), include_stop_str_in_output=includes, skip_special_tokens=not special
    )
    factory = OutputFactory(tokenizer, tokenizer.vocab_size, 999)

    def text_of(ids):
        state = factory.start(SequenceSpec((5,), sampling))
        pieces = [token.text for token_id in ids if (token := state.push(token_id)) is not None]
        assert state.finish is not None
        return "".join(pieces) + state.finish.tail

    begun, pad = tokenizer.encode("the dog EN"), "<pad>" if special else ""
    assert text_of([*begun, *tokenizer.encode("D!")]) == "the dog " + ("END" if includes else "")
    assert text_of([*begun, 1, 0]) == f"the dog EN{pad}" + ("</s>" if includes and special else "")


@pytest.mark.parametrize("deterministic", [False, True])
def test_bad_words_are_never_completed(deterministic):
    """The oracle writes random letters. Without a bad word, it writes each of these texts."""
    spec = engines.spec_of("abc", max_tokens=60, temperature=1.0, seed=3, deterministic=deterministic, ignore_eos=True)
    free = bytes(engines.oracle().expected(spec)).decode(errors="replace")
    words = tuple({free[9], free[20:22], free[30:33]})
    sampling = replace(spec.sampling, bad_words=words)
    shapes = FixedShapes(rows=4, tokens=8)
    engine = engines.engine_of(engines.oracle(), shapes=shapes)
    found = engines.run(engine, [replace(spec, sampling=sampling)]).ids(engines.key_of(0))
    text = bytes(found).decode(errors="replace")
    assert len(text) == 60
    assert not any(word in text for word in words)
    assert text.startswith(free[: min(free.index(word) + len(word) - 1 for word in words)])


@pytest.mark.parametrize(("word", "barred"), [("green", "green"), (" green", "green"), ("\n", "\n"), (" ", " ")])
def test_a_bad_word_is_also_barred_after_a_space(word, barred):
    tokenizer = load_tokenizer(DEMO)
    spellings = [barred, f" {barred}"] if barred.strip() else [barred]
    expected = tuple(tuple(tokenizer.encode_plain(text)) for text in spellings)
    assert all(expected)
    assert len({*map(len, expected)}) == len(spellings), "the spellings differ in their number of tokens"
    assert bad_words_of(Sampling(bad_words=(word,)), tokenizer, tokenizer.vocab_size) == expected


def test_a_bad_word_that_the_model_cannot_draw_bars_nothing():
    """A tokenizer may have tokens beyond the rows of the head. Their places are those of other requests."""
    tokenizer, words = load_tokenizer(DEMO), Sampling(bad_words=("green", "the"))
    ids = {word: bad_words_of(Sampling(bad_words=(word,)), tokenizer, 10**6) for word in words.bad_words}
    least = max(token for spelling in ids["the"] for token in spelling) + 1
    assert any(max(spelling) >= least for spelling in ids["green"])
    kept = tuple(spelling for word in words.bad_words for spelling in ids[word] if max(spelling) < least)
    assert bad_words_of(words, tokenizer, least) == kept


@pytest.mark.parametrize("text", [*CORPUS, " two  spaces", "龘😀é"])
def test_pieces_are_the_bytes_of_a_text(tokenizer, text):
    """Also those of tokens that are a part of a character."""
    assert b"".join(tokenizer.piece(token_id)[0] for token_id in tokenizer.encode(text)) == text.encode()
    assert tokenizer.piece(10**6)[0] == b""
