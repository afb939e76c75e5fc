import json
import sys
import threading
from unittest import mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from baton.errors import CheckpointError
from baton.tokenizer import ORACLE_EOS, OracleTokenizer, load_tokenizer

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


def save_bpe(folder, *, bos=False, truncate=False, eos=None):
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    raw.train_from_iterator(["some words to merge, some words to keep"] * 5, trainer)
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    if truncate:
        raw.enable_truncation(3)
        raw.enable_padding(length=50)
    raw.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module", params=["bpe", "oracle"])
def tokenizer(request):
    return load_tokenizer("oracle" if request.param == "oracle" else request.getfixturevalue("folder"))


@given(unicode_text)
def test_any_text_comes_back_at_once_and_streamed(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream(tokenizer.encode("some prompt"))
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@given(st.lists(st.sampled_from([0, 1, 5000, *range(2, 300)]), max_size=200), st.integers(0, 120))
def test_no_token_waits_for_a_long_tail(folder, ids, invalid):
    """Special tokens, ids beyond the vocabulary and bytes that are no text take the time of ordinary tokens."""
    tokenizer, longest = load_tokenizer(folder), 0
    [head] = tokenizer.encode("\U0001f600")[:1]
    ids = [*ids, *[head] * invalid]
    whole, decoded = tokenizer.decode(ids), tokenizer.decode

    def decode(part):
        nonlocal longest
        longest = max(longest, len(part))
        return decoded(part)

    with mock.patch.object(tokenizer, "decode", decode):
        stream = tokenizer.stream([])
    assert "".join(map(stream.push, ids)) + stream.flush() == whole
    assert longest <= 40


def test_prompt_that_ends_within_a_character(tokenizer):
    half = tokenizer.encode("é")[:1]
    if len(tokenizer.encode("é")) == 1:
        pytest.fail("this test needs a character of two tokens")
    stream = tokenizer.stream(half)
    assert "".join(map(stream.push, tokenizer.encode("abc"))) == "abc"


def test_oracle_is_bytes_and_an_end():
    tokenizer = OracleTokenizer()
    assert tokenizer.encode("hé") == list("hé".encode())
    assert tokenizer.eos_ids == (ORACLE_EOS,) == (tokenizer.vocab_size - 1,)
    assert tokenizer.decode([104, ORACLE_EOS, 105]) == "hi"
    assert tokenizer.stream([]).push(ORACLE_EOS) == ""


def test_first_token_keeps_the_space_that_decoding_alone_would_strip(tmp_path):
    vocab = [("<unk>", 0.0), ("▁the", -1.0), ("▁dog", -1.0), ("s", -2.0), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    raw = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([2]) == "dog"
    stream = tokenizer.stream([1])
    assert [stream.push(i) for i in (2, 3)] == [" dog", "s"]
    assert [stream.push(4 + b) for b in "é".encode()] == ["", "é"]


def test_special_tokens_have_no_text(folder):
    tokenizer = load_tokenizer(folder)
    ids = [0, *tokenizer.encode("some words"), 1]
    assert tokenizer.decode(ids) == "some words"
    stream = tokenizer.stream([])
    assert "".join(map(stream.push, ids)) == "some words"


def test_special_tokens_of_the_file_count_and_its_truncation_and_padding_do_not(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path, truncate=True))
    text = "some words to keep and not to cut"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert load_tokenizer(save_bpe(tmp_path, bos=True)).encode("some")[0] == 0


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({}, {"eos_token_id": 1}, (1,)),
        ({"eos_token_id": [7, 1]}, {"eos_token_id": 1}, (7, 1)),
        ({"eos_token_id": 5}, {"eos_token_id": None}, (5,)),
        (None, {}, ()),
    ],
)
def test_eos_ids_of_both_files(tmp_path, generation, config, wanted):
    save_bpe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_tokenizer(tmp_path).eos_ids == wanted


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [1, -1]}'),
    ],
)
def test_bad_file_is_named(tmp_path, name, content):
    save_bpe(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)


@pytest.fixture
def turns_where_calls_allow_them():
    """Long switch interval: the interpreter switches threads only when the running one yields."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def calls_until_another_thread_runs(call, most):
    """Return the number of calls until this thread ran again, or `most` if it never did before the last call."""
    done, begun, seen = 0, threading.Event(), False

    def work():
        nonlocal done
        begun.set()
        while done < most and not seen:
            call()
            done += 1

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    found, seen = done, True
    thread.join()
    return found


@pytest.mark.usefixtures("turns_where_calls_allow_them")
@pytest.mark.parametrize("what", ["encode", "encode_rendered", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(folder, what):
    """A router's event loop must serve other requests."""
    tokenizer, text = load_tokenizer(folder), "some words to keep " * 2_000
    ids = tokenizer.encode(text)
    given, wanted = (ids, text) if what == "decode" else (text, ids)
    call = getattr(tokenizer, what)
    assert call(given) == wanted
    assert calls_until_another_thread_runs(lambda: call(given), 200) < 200


@pytest.mark.usefixtures("turns_where_calls_allow_them")
def test_a_call_that_lets_no_thread_run_is_noticed():
    assert calls_until_another_thread_runs(lambda: sum(range(20_000)), 50) == 50
