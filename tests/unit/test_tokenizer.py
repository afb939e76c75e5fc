import json
import os
import subprocess
import sys
import threading
from unittest import mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from baton.errors import CheckpointError
from baton.gguf.conversion import output_of
from baton.tokenizer import _CONVERSION, ORACLE_EOS, OracleTokenizer, load_tokenizer

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
    spelling = vars(tokenizer)["_spelling"]

    def spelled(part):
        nonlocal longest
        longest = max(longest, len(part))
        return spelling(part)

    with mock.patch.object(tokenizer, "_spelling", spelled):
        stream = tokenizer.stream([])
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)
    assert longest <= 2


def test_prompt_that_ends_within_a_character(tokenizer):
    half = tokenizer.encode("é")[:1]
    if len(tokenizer.encode("é")) == 1:
        pytest.fail("this test needs a character of two tokens")
    for answer in (tokenizer.encode("abc"), tokenizer.encode("é")[1:] + tokenizer.encode("abc")):
        stream = tokenizer.stream(half)
        assert "".join(map(stream.push, answer)) == tokenizer.decode(answer)


def test_oracle_is_bytes_and_an_end():
    tokenizer = OracleTokenizer()
    assert tokenizer.encode("hé") == list("hé".encode())
    assert tokenizer.eos_ids == (ORACLE_EOS,) == (tokenizer.vocab_size - 1,)
    assert tokenizer.decode([104, ORACLE_EOS, 105]) == "hi"
    assert tokenizer.stream([]).push(ORACLE_EOS) == ""


def bytewise(folder, *words):
    """Save a tokenizer in sentencepiece's manner. The ids of the words are 2, 3, ..., those of bytes begin at 100."""
    plain = ["<unk>", "<s>", *words, *(f"<unused{i}>" for i in range(98 - len(words)))]
    vocab = [(text, -1.0) for text in plain] + [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    raw = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<s>"])
    raw.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def in_bytes(text):
    return [100 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


@pytest.mark.parametrize("words", [("▁the", "▁dog", "s"), ("▁the", "▁dog", "zz")], ids=["a letter", "no letter"])
@pytest.mark.parametrize(
    "prompt", [[], [1], [2], [2, 1], in_bytes("龘龘龘"), [2, *in_bytes("é") * 9], [2, *[1] * 9], in_bytes(b"\xff\xff")]
)
def test_the_first_token_is_spelled_as_after_the_whole_prompt(tmp_path, words, prompt):
    tokenizer = bytewise(tmp_path, *words)
    before = tokenizer.decode(prompt)
    for answer in ([3, 4, *in_bytes("é日"), 3, *in_bytes("\n"), 4], [*in_bytes("日"), 3]):
        if prompt[-1:] != in_bytes(b"\xff") or answer[0] == 3:
            stream = tokenizer.stream(prompt)
            text = "".join(map(stream.push, answer)) + stream.flush()
            assert text == tokenizer.decode(prompt + answer)[len(before) :]


def test_an_unfinished_character_holds_back_three_bytes_at_most(tmp_path):
    tokenizer = bytewise(tmp_path, "▁the")
    for part in (b"\xff", b"\xf0\x9f\x98", "é".encode() + b"\x80"):
        ids, stream, text = in_bytes(part * 700), tokenizer.stream([2]), ""
        for count, token_id in enumerate(ids, 1):
            text += stream.push(token_id)
            assert len(text.encode(errors="replace")) >= count - 3
        assert text + stream.flush() == (part * 700).decode(errors="surrogateescape").translate(
            dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")
        )
    stream = tokenizer.stream([2])
    assert [stream.push(i) for i in [*in_bytes("日")[:2], 2, *in_bytes("日")]] == [
        "",
        "",
        "\ufffd\ufffd the",
        "",
        "",
        "日",
    ]


def test_special_tokens_have_no_text(folder):
    tokenizer = load_tokenizer(folder)
    ids = [0, *tokenizer.encode("some words"), 1]
    assert tokenizer.decode(ids) == "some words"
    stream = tokenizer.stream([])
    assert "".join(map(stream.push, ids)) == "some words"


def test_marks_of_reasoning_and_calls_have_a_text_in_streams(tmp_path):
    save_bpe(tmp_path, eos=1)
    marks = ("[THINK]", "<|end|>", "<|other|>")
    listed = {str(300 + at): {"content": text, "special": True} for at, text in enumerate(marks)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    for harmony in (False, True):
        if harmony:
            listed["303"] = {"content": "<|channel|>", "special": True}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
        tokenizer = load_tokenizer(tmp_path)
        begin, *rest = [tokenizer.token_id(text) or 0 for text in marks]
        stream, ids = tokenizer.stream([]), [begin, *tokenizer.encode("some"), *rest, 1]
        assert "".join(map(stream.push, ids)) == ("[THINK]some<|end|>" if harmony else "[THINK]some")
        assert tokenizer.decode(ids) == "some"


def test_special_tokens_of_the_file_count_and_its_truncation_and_padding_do_not(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path, truncate=True))
    text = "some words to keep and not to cut"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert load_tokenizer(save_bpe(tmp_path, bos=True)).encode("some")[0] == 0


@pytest.mark.parametrize(
    ("generation", "config", "own", "wanted"),
    [
        ({}, {"eos_token_id": 1}, None, (1,)),
        ({"eos_token_id": [7, 1]}, {"eos_token_id": 1}, None, (7, 1)),
        ({"eos_token_id": 5}, {"eos_token_id": None}, "</s>", (5, 1)),
        ({"eos_token_id": 1}, {"text_config": {"eos_token_id": 9}}, {"content": "</s>"}, (1, 9)),
        (None, {}, {"content": "<new>", "special": True}, (277,)),
        (None, {}, None, ()),
    ],
)
def test_eos_ids_are_those_of_all_files(tmp_path, generation, config, own, wanted):
    save_bpe(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": own}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_tokenizer(tmp_path).eos_ids == wanted


DECLARED = {
    "added_tokens_decoder": {
        "279": {"content": "<b>", "special": False, "normalized": False, "rstrip": True},
        "278": {"content": "<a>", "special": True},
        "0": {"content": "<s>", "special": False},
    },
    "eos_token": "<end>",
    "additional_special_tokens": ["<c>", "</s>"],
    "image_token": "some",
    "sep_token": "<n>",
}
OLDER = {"bos_token": {"content": "<end>", "__type": "AddedToken"}, "extra_special_tokens": {"x_token": "<c>"}}


@pytest.mark.parametrize("config", [DECLARED, OLDER, {}])
def test_tokens_of_tokenizer_config_are_those_that_transformers_adds(tmp_path, config):
    from transformers import PreTrainedTokenizerFast

    raw = tokenizers.Tokenizer.from_file(str(save_bpe(tmp_path) / "tokenizer.json"))
    raw.add_tokens([tokenizers.AddedToken("<n>", special=False)])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if "added_tokens_decoder" not in config:
        (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<a>"}')
        (tmp_path / "added_tokens.json").write_text('{"<b>": 278, "<a>": 279}')
    mine, peer = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "some<a>words <b> <c></s><end>some<s> <n>"
    ids = peer.encode(text)
    assert len(peer) > 277
    assert mine.encode(text) == ids
    assert mine.decode(ids) == peer.decode(ids, skip_special_tokens=True)
    stream = mine.stream([])
    assert "".join(map(stream.push, ids)) == mine.decode(ids)


def test_ids_of_the_padded_vocabulary_are_valid_and_no_token_is_added_beyond_it(tmp_path):
    save_bpe(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "<end>"}))
    for config in ({"vocab_size": 278}, {"text_config": {"vocab_size": 278}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.vocab_size, tokenizer.eos_ids) == (278, (277,))
        assert len(tokenizer.encode("<pad>")) > 1
    (tmp_path / "config.json").write_text('{"vocab_size": 326}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 326
    assert tokenizer.decode([325, *tokenizer.encode("some")]) == "some"
    assert tokenizer.stream([325]).push(325) == ""


@pytest.mark.slow
def test_a_missing_tokenizer_json_is_made_by_transformers(tmp_path):
    raw = json.loads((save_bpe(tmp_path) / "tokenizer.json").read_text())["model"]
    right, text = load_tokenizer(tmp_path), "some words <|x|> naïve"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(raw["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in raw["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": "<s>"}')
    made = load_tokenizer(tmp_path)
    assert made.encode_plain(text) == right.encode_plain(text)
    assert made.decode(made.encode(text)) == text
    (tmp_path / "vocab.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(
        CheckpointError, match=r"no tokenizer.json, and tokenizer.model .* then python -c \"from transf"
    ):
        load_tokenizer(tmp_path)


@pytest.fixture
def kimi(tmp_path):
    """A folder whose tokenizer only its own code can make. The code writes the file `ran`."""
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n")
    listed = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["own.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(listed))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return tmp_path


@pytest.mark.slow
def test_no_code_of_a_checkpoint_runs_even_if_an_operator_allows_it(kimi):
    """transformers would ask, and take the answer from the input of the process."""
    argv = [sys.executable, "-c", _CONVERSION, str(kimi)]
    done = subprocess.run(argv, input="y\n", text=True, capture_output=True, check=False)
    assert done.returncode
    assert "Do you wish to run the custom code" not in done.stdout
    assert "contains custom code" in done.stderr
    assert not (kimi / "ran").exists()


def test_a_folder_with_tiktoken_model_only_needs_a_tokenizer_json(kimi):
    """The command that makes one of other files would fail for it."""
    failure = mock.patch("baton.tokenizer.output_of", side_effect=CheckpointError("not converted"))
    with failure as convert, pytest.raises(CheckpointError):
        load_tokenizer(kimi)
    _, problem, remedy = convert.call_args.args
    assert problem == f"{kimi}: no tokenizer.json, and tiktoken.model cannot be converted"
    assert remedy.startswith("add a tokenizer.json that was made elsewhere")


def test_programs_that_convert_get_no_input():
    kept, (read, write) = os.dup(0), os.pipe()
    try:
        os.write(write, b"y\n")
        os.dup2(read, 0)
        os.close(write)
        assert output_of(("-c", "print(repr(__import__('sys').stdin.read()))"), "problem", "remedy") == "''\n"
    finally:
        os.dup2(kept, 0)
        for each in (kept, read):
            os.close(each)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [1, -1]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": {"content": "<x>"}}}'),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}'),
        ("added_tokens.json", '{"<x>": null}'),
        ("added_tokens.json", '{"<x>": "a"}'),
        ("added_tokens.json", '{"<x>": [1]}'),
        ("added_tokens.json", '{"\\ud800": 300}'),
        ("special_tokens_map.json", '{"eos_token": {"content": "\\ud800"}}'),
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
@pytest.mark.parametrize("what", ["encode", "encode_plain", "decode"])
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


def test_the_identity_is_that_of_the_vocabulary_in_every_process(folder, tmp_path):
    """A router compares its own with those of workers, which may have another revision with more added tokens."""
    own = load_tokenizer(folder).identity()
    program = f"from baton.tokenizer import load_tokenizer as a; print(a({str(folder)!r}).identity())"
    env = os.environ | {"PYTHONHASHSEED": "7"}
    assert (
        subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout
        == f"{own}\n"
    )
    fields = json.loads((folder / "tokenizer.json").read_text())
    words = fields["model"]["vocab"]
    fields["model"]["vocab"] = dict(reversed(words.items()))
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    added = {"added_tokens_decoder": {str(len(words)): {"content": "<more>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    assert load_tokenizer(tmp_path).identity() == own
    words["a"], words["b"] = words["b"], words["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | {"model": fields["model"] | {"vocab": words}}))
    assert load_tokenizer(tmp_path).identity() != own
