"""Receipts: their bytes by the documented rules, signatures that cover every member, keys, and comparisons."""

import hashlib
import json
import struct
from dataclasses import fields, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from baton.core import Constraint, Finish, FinishReason, Sampling, SequenceSpec, TokenLogprobs
from baton.errors import ConfigError, EngineFault, InvalidRequest
from baton.receipts import form, issuer
from baton.receipts.compare import Replayed, first_difference
from baton.receipts.issuer import ComputedChoice, Issuer
from baton.receipts.keys import PublicKeys, ReceiptKey

KEY = ReceiptKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
PROMPT = (5, 70000)
ASKED = Sampling(
    max_tokens=4, temperature=0.7, seed=2**63 - 1, stop=("é",), logit_bias=((3, -0.5),), bad_words=("x",), logprobs=0
)
SPEC = SequenceSpec(PROMPT, ASKED, constraint=Constraint("choices", ("a", "b")), deterministic=True)
FIRST = ComputedChoice((7, 8), (TokenLogprobs(-0.25), TokenLogprobs(-1.5)), Finish(FinishReason.LENGTH))
ENDED = ComputedChoice((9,), (TokenLogprobs(-0.5),), Finish(FinishReason.EOS, "0", logprobs=TokenLogprobs(-2.0)))


def issued(*choices, spec=SPEC):
    return json.loads(Issuer(KEY, "demo").issue("r1", spec, "fp", choices or (FIRST, ENDED), 1234.9))


def f32(*values):
    return b"".join(struct.pack("<f", value) for value in values)


def test_it_has_the_documented_bytes():
    receipt = issued()
    assert receipt["prompt"] == {"tokens": 2, "sha256": hashlib.sha256(struct.pack("<II", *PROMPT)).hexdigest()}
    magic, one, two, end = b"baton receipt 1\n", struct.pack("<I", 7), struct.pack("<I", 8), struct.pack("<I", 9)
    first = hashlib.sha256(magic + one + f32(-0.25) + two + f32(-1.5)).hexdigest()
    ended = hashlib.sha256(magic + end + f32(-0.5) + f32(-2.0)).hexdigest()
    assert receipt["choices"] == [
        {"tokens": 2, "sha256": first, "finish_reason": "length", "matched_stop": ""},
        {"tokens": 1, "sha256": ended, "finish_reason": "eos", "matched_stop": "0"},
    ]
    assert receipt["opening"]["choices"][1] == {"ids": [9], "logprobs": "bf000000", "end": "c0000000"}
    assert (receipt["sampling"]["temperature"], receipt["sampling"]["seed"]) == ("0.7", str(2**63 - 1))
    assert receipt["constraint"] == {"kind": "choices", "texts": ["a", "b"]}
    signed = {name: value for name, value in receipt.items() if name not in {"signature", "opening"}}
    expected = json.dumps(signed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert form.parse(receipt).signed_bytes() == expected
    assert (receipt["issued_at"], receipt["request_id"], receipt["system_fingerprint"]) == (1234, "r1", "fp")


def test_the_parameters_come_back_as_options():
    given = form.parse(issued()).parameters()
    assert set(given) == {field.name for field in fields(Sampling)} - {"logprobs"}
    lists = {name: tuple(given[name]) for name in ("stop", "stop_token_ids", "bad_words")}
    assert Sampling(**given | lists | {"logprobs": 0, "logit_bias": tuple(given["logit_bias"].items())}) == ASKED


def places(value, path=()):
    """Yield the path of every leaf."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield path
        return
    for key, each in items:
        yield from places(each, (*path, key))


OTHER = {
    int: lambda value: value + 1,
    bool: lambda value: not value,
    str: lambda value: f"{value}0",
    list: lambda _: [1],
}


@pytest.mark.parametrize("path", [path for path in places(issued()) if path[0] != "opening"], ids=str)
def test_a_change_of_any_signed_member_is_found(path):
    receipt = issued()
    *parents, last = path
    inner = receipt
    for part in parents:
        inner = inner[part]
    inner[last] = OTHER[type(inner[last])](inner[last])
    with pytest.raises(InvalidRequest):
        KEY.public().check(form.parse(receipt))


@pytest.mark.parametrize("change", [{"prompt_ids": [5, 70001]}, {"choices": []}, {"ids": [7, 9]}, {"end": "00000000"}])
def test_an_opening_with_other_values_than_its_digests_is_found(change):
    receipt = issued()
    if {*change} <= {"ids", "end"}:
        receipt["opening"]["choices"][0] |= change
    else:
        receipt["opening"] |= change
    with pytest.raises(InvalidRequest, match=r"receipt\.opening"):
        form.parse(receipt)


def test_an_opening_is_optional_and_a_client_adds_the_prompt():
    receipt = json.loads(form.with_prompt(json.dumps(issued()), PROMPT))
    assert receipt["opening"]["prompt_ids"] == [*PROMPT]
    KEY.public().check(form.parse(receipt))
    del receipt["opening"]
    KEY.public().check(form.parse(receipt))
    with pytest.raises(InvalidRequest, match="prompt_ids: differ"):
        form.with_prompt(json.dumps(issued()), [1])


@pytest.mark.parametrize("opening", [None, [], {"choices": None}])
def test_the_prompt_is_added_to_any_opening_or_the_wrong_one_is_named(opening):
    receipt = json.dumps(issued() | {"opening": opening})
    if isinstance(opening, list):
        with pytest.raises(InvalidRequest, match=r"^receipt\.opening"):
            form.with_prompt(receipt, PROMPT)
    else:
        assert json.loads(form.with_prompt(receipt, PROMPT))["opening"] == {"prompt_ids": [*PROMPT]}


def test_a_long_answer_has_a_short_receipt(monkeypatch):
    monkeypatch.setattr(issuer, "MAX_OPENED_TOKENS", 2)
    assert "opening" not in issued()
    assert "opening" in issued(FIRST)


@pytest.mark.parametrize("lacking", ["logprobs", "finish", "fingerprint"])
def test_nothing_is_signed_without_all_parts(lacking):
    choice = {
        "logprobs": ComputedChoice((7, 8), FIRST.logprobs[:1], FIRST.finish),
        "finish": ComputedChoice(FIRST.tokens, FIRST.logprobs, None),
    }.get(lacking, FIRST)
    with pytest.raises(EngineFault, match="cannot have a receipt"):
        Issuer(KEY, "demo").issue("r", SPEC, "" if lacking == "fingerprint" else "fp", [choice], 0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "receipt.version"),
        ({"more": 1}, "receipt.more"),
        ({"choices": []}, "receipt.choices"),
        ({"issued_at": 1.5}, "receipt.issued_at"),
        ({"sampling": {"max_tokens": 1}}, "receipt.sampling.bad_words: is missing"),
        (
            {"sampling": issued()["sampling"] | {"seed": "secret"}},
            r"receipt\.sampling\.seed: has a value of a wrong kind$",
        ),
    ],
)
def test_what_is_no_receipt_is_rejected_by_name(change, words):
    with pytest.raises(InvalidRequest, match=words):
        form.parse(issued() | change)


# --- keys


def pem(key):
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*formats)


@pytest.fixture
def file(tmp_path):
    """A function that writes a key file with this mode and returns its path."""

    def write(data, mode=0o600):
        path = tmp_path / "receipt.pem"
        path.write_bytes(data)
        path.chmod(mode)
        return path

    return write


def test_a_key_and_its_public_part_are_read_and_another_key_is_rejected(file):
    key = ed25519.Ed25519PrivateKey.generate()
    read = ReceiptKey.read(file(pem(key)))
    signed = form.parse(json.loads(Issuer(read, "demo").issue("r", SPEC, "fp", [FIRST], 0.0)))
    blocks = [
        one.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        for one in (ed25519.Ed25519PrivateKey.generate().public_key(), key.public_key())
    ]
    PublicKeys.read(file(b"".join(blocks))).check(signed)
    with pytest.raises(InvalidRequest, match=r"receipt.key: 'ed25519:[0-9a-f]{16}' is not a given public key"):
        PublicKeys.read(file(blocks[0])).check(signed)
    for signature in ("????", "é"):
        with pytest.raises(InvalidRequest, match=r"receipt\.signature"):
            read.public().check(signed.model_copy(update={"signature": signature}))


@pytest.mark.parametrize(
    ("data", "mode", "words"),
    [
        (b"", 0o600, "is no private key in PEM; make one with: openssl genpkey"),
        (pem(rsa.generate_private_key(65537, 1024)), 0o600, "must be an Ed25519 key, got RSAPrivateKey"),
        (pem(ed25519.Ed25519PrivateKey.generate()), 0o604, "all users of this machine can read it"),
        (
            ed25519.Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"x"),
            ),
            0o600,
            "is encrypted",
        ),
    ],
    ids=["empty", "rsa", "open", "encrypted"],
)
def test_a_wrong_key_file_is_named(file, data, mode, words):
    path = file(data, mode)
    with pytest.raises(ConfigError, match=f"security.receipt_key: {path}: {words}"):
        ReceiptKey.read(path)
    with pytest.raises(ConfigError, match=r"security.receipt_key: .*: cannot be read: No such file"):
        ReceiptKey.read(path.with_name("missing"))
    with pytest.raises(ConfigError, match=f"--public-key: {path}: has no public key"):
        PublicKeys.read(path)


# --- comparison


def again(choice, reason="length", matched=""):
    return Replayed(choice.opened(), reason, matched)


def difference(receipt, computed) -> Any:
    """Return the first difference, as Any because tests read parts of one that may be None."""
    return first_difference(receipt, computed)


def test_the_first_difference():
    receipt = form.parse(issued(FIRST, ENDED))
    same = [again(FIRST), again(ENDED, "eos", "0")]
    assert difference(receipt, same) is None
    closer = replace(FIRST, logprobs=(TokenLogprobs(-0.25), TokenLogprobs(-1.5000001)))
    found = difference(receipt, [again(closer), same[1]])
    assert (found.choice, found.position, found.recorded.bits, found.replayed.bits) == (0, 1, "bfc00000", "bfc00001")
    assert str(found) == (
        "choice 0, position 1: token 8, log-probability -1.5 (bfc00000) then;"
        " token 8, log-probability -1.5000001192092896 (bfc00001) now"
    )
    shorter = replace(FIRST, tokens=(7,), logprobs=FIRST.logprobs[:1])
    found = difference(receipt, [again(shorter), same[1]])
    assert (found.position, found.recorded.token, found.replayed.token) == (1, 8, None)
    for other in (
        again(ENDED, "stop_token", "0"),
        again(replace(ENDED, finish=Finish(FinishReason.EOS, "0")), "eos", "0"),
    ):
        found = difference(receipt, [same[0], other])
        assert (found.choice, found.what, found.position) == (1, "end", 1)
    short = receipt.model_copy(update={"opening": None})
    assert difference(short, same) is None
    found = difference(short, [again(closer), same[1]])
    assert (found.position, str(found)) == (
        None,
        "choice 0 differs; the receipt has no opening, so the position is unknown",
    )
