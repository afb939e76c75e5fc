"""`baton replay`: files, prompts, exit codes and texts, without a cluster."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.requests import replay as command
from baton.cli.requests.receipt_files import PromptFile, read_sources
from baton.errors import ConfigError, NoWorker
from baton.receipts import form
from tests.unit.receipts.test_receipts import ENDED, FIRST, KEY, PROMPT, SPEC, again, issued

TEXT = form.with_prompt(json.dumps(issued()), PROMPT)
STOP = replace(SPEC, sampling=replace(SPEC.sampling, stop=("a\u2028b\u2029c\x85d",)))
SEPARATORS = json.dumps(issued(spec=STOP), ensure_ascii=False)


@pytest.fixture
def files(tmp_path):
    """A folder with a receipt and the public key."""
    public = KEY._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    (tmp_path / "a.json").write_text(TEXT)
    return tmp_path


def run(*options):
    done = CliRunner().invoke(app, ["replay", *map(str, options)])
    return done.exit_code, done.output


def verify(files, name, *options):
    return run(files / name, "--verify-only", "--public-key", files / "public.pem", *options)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (TEXT, 0, "verified"),
        (json.dumps({"receipt": json.loads(TEXT), "choices": []}), 0, "verified"),
        (json.dumps({"receipt": TEXT}), 0, "verified"),
        (f"{TEXT}\n{TEXT}\n", 0, "2 receipts: 2 verified"),
        (f"{TEXT}\n{TEXT[:40]}\n", 2, "r.json:2: error: receipt: is not a JSON object; the file may be truncated"),
        (TEXT[:300], 2, "error: receipt: is not JSON; the file may be truncated"),
        (TEXT.replace('"demo"', '"other"'), 2, "receipt.signature: is not that of ed25519:"),
        ("7", 2, "is not a JSON object"),
        ("[]", 2, "r.json: has no receipt"),
        ('{"receipt": []}', 2, "r.json: has no receipt"),
        (f"\n{SEPARATORS}\n{SEPARATORS}\n", 0, "2 receipts: 2 verified"),
        (f"\n{TEXT}\n\n{TEXT[:40]}", 2, "r.json:4: error"),
    ],
)
def test_a_file_is_verified_without_a_cluster(files, text, code, words):
    (files / "r.json").write_text(text)
    found, output = verify(files, "r.json")
    assert (found, words in output) == (code, True), output


def test_a_file_without_a_receipt_needs_no_cluster(files, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(files / "home"))  # where no cluster runs
    (files / "r.json").write_text(TEXT[:300])
    for given, words in (
        ("r.json", "error: receipt: is not JSON"),
        ("none.json", "none.json: cannot be read: No such"),
    ):
        code, output = run(files / given)
        assert (code, words in output, "NoWorker" in output) == (2, True, False), output
    assert "NoWorker" in run(files / "a.json")[1]


def test_a_folder_and_json(files):
    (files / "b.jsonl").write_text(f"{TEXT}\n{TEXT}")
    code, output = verify(files, "", "--json")
    assert (code, json.loads(output)["verified"]) == (0, 3)


def test_an_unreadable_file_loses_no_other_of_its_folder(files):
    (files / "b.json").write_bytes(TEXT.encode()[:40] + b"\xc3")
    (files / "c.json").mkdir()
    (files / "d.json").write_text("[" * 5000 + TEXT + "]" * 5000)
    code, output = verify(files, "", "--json")
    found = json.loads(output)
    assert (code, found["verified"], found["error"]) == (2, 1, 3), output
    assert "not UTF-8" in found["outcomes"][1]["error"]


def test_a_wrong_key_or_none_is_an_error(files):
    assert run(files / "a.json", "--verify-only")[0] != 0
    (files / "public.pem").write_text("")
    code, output = verify(files, "a.json")
    assert (code, "has no public key in PEM" in output) == (2, True)
    assert verify(files, "missing.json")[0] == 2
    with pytest.raises(ConfigError, match="has no file that ends with"):
        list(read_sources(files / "empty" if (files / "empty").mkdir() is None else files))


def test_a_prompt_is_compared_with_its_digest(files):
    (files / "right.json").write_text(json.dumps({"tokens": [*PROMPT], "count": 2}))
    assert verify(files, "a.json", "--prompt", files / "right.json")[0] == 0
    (files / "wrong.json").write_text("[5, 6, 7]")
    code, output = verify(files, "a.json", "--prompt", files / "wrong.json")
    assert (code, "--prompt: has another digest than receipt.prompt: 3 tokens, and 2 there" in output) == (2, True)
    for wrong in (-1, 2**32):
        (files / "wrong.json").write_text(f"[5, {wrong}]")
        assert verify(files, "a.json", "--prompt", files / "wrong.json") == (
            2,
            f"baton: ConfigError: --prompt: {files / 'wrong.json'}: token ids must be 0 to 4294967295, got {wrong}\n",
        )
    (files / "text.txt").write_text("a text")
    assert PromptFile.read(files / "text.txt").text == "a text"
    assert "must have token ids with --verify-only" in verify(files, "a.json", "--prompt", files / "text.txt")[1]


def test_a_folder_that_cannot_be_read_is_an_error(files, monkeypatch):
    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", forbidden)
    code, output = verify(files, "")
    assert (code, f"RECEIPT: {files}: cannot be read: Permission denied" in output) == (2, True)


@pytest.mark.parametrize(
    ("computed", "code", "words"),
    [
        ([again(FIRST), again(ENDED, "eos", "0")], 0, "a.json: equal"),
        (
            [again(FIRST, "eos"), again(ENDED, "eos", "0")],
            1,
            "differs: choice 0, position 2: no token then; no token now",
        ),
        (NoWorker("away"), 2, "error: NoWorker: away"),
        (OverflowError("too large"), 2, "error: OverflowError: too large"),
    ],
)
def test_the_exit_code_is_that_of_the_result(files, monkeypatch, computed, code, words):
    async def answered(*_):
        if isinstance(computed, Exception):
            raise computed
        return computed

    monkeypatch.setattr(command, "answered_again", answered)
    found, output = run(files / "a.json", "--public-key", files / "public.pem", "--target", "127.0.0.1:1")
    assert (found, words in output) == (code, True), output


@pytest.mark.parametrize("checked", [True, False])
def test_json_has_whether_the_signature_was_checked(files, monkeypatch, checked):
    async def answered(*_):
        return [again(FIRST), again(ENDED, "eos", "0")]

    monkeypatch.setattr(command, "answered_again", answered)
    key = ("--public-key", files / "public.pem") if checked else ()
    code, output = run(files / "a.json", *key, "--target", "127.0.0.1:1", "--json")
    [outcome] = json.loads(output.splitlines()[-1])["outcomes"]
    assert (code, outcome["result"], outcome["signature"]) == (0, "equal", "checked" if checked else "unchecked")


def test_a_wrong_signature_is_not_checked_in_json(files):
    (files / "r.json").write_text(json.dumps(json.loads(TEXT) | {"issued_at": 1}))
    [outcome] = json.loads(verify(files, "r.json", "--json")[1])["outcomes"]
    assert (outcome["result"], outcome["signature"]) == ("error", "unchecked")
