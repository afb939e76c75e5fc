"""The audit digest: vectors made by hand from the documented bytes. Every bit counts."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from baton.core import Sampling, TokenLogprobs
from router import audit_digest as audit
from router.audit_digest import Delivered, audit_digest, joined

MAGIC = b"baton audit 1\n"


def test_a_plain_greedy_answer():
    asked = Sampling(max_tokens=3, temperature=0.0)
    expected = (
        MAGIC
        + pack("<I2I", 2, 5, 70000)  # prompt
        + pack("<IIffIf", 3, 0, 0.0, 1.0, 0, 0.0)
        + pack("<B", 0)  # no seed
        + pack("<fff", 1.0, 0.0, 0.0)
        + pack("<II", 0, 0)  # stop, stop_token_ids
        + pack("<B", 0)
        + pack("<I", 0)  # logit_bias
        + pack("<i", -1)
        + pack("<I", 1)  # answers
        + pack("<I3I", 3, 7, 8, 9)
        + pack("<I", 0)
    )
    found = audit_digest((5, 70000), asked, [Delivered([7, 8, 9])])
    assert found == sha256(expected).hexdigest()
    assert found == "49286fdd2dcdf97ce9f0428308118754da930799e9efea6c04e1b9ea7305f450"


def test_everything_at_once():
    asked = Sampling(
        max_tokens=2**31 - 1,
        min_tokens=1,
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        stop=("\n", "Ende ä"),
        stop_token_ids=(2, 1),
        ignore_eos=True,
        logit_bias=((3, -100.0), (4, 0.75)),
        logprobs=2,
    )
    first = TokenLogprobs(-0.1, ((7, -0.1), (1, -3.5)))
    answers = [Delivered([7], [first]), Delivered([])]
    expected = (
        MAGIC
        + pack("<II", 1, 0)
        + pack("<IIffIf", 2**31 - 1, 1, 0.5, 0.25, 40, 0.125)
        + pack("<BQ", 1, 2**64 - 1)
        + pack("<fff", 1.5, -2.0, 2.0)
        + pack("<I", 2)
        + pack("<I1s", 1, b"\n")
        + pack("<I7s", 7, "Ende ä".encode())
        + pack("<I2I", 2, 2, 1)
        + pack("<B", 1)
        + pack("<IIfIf", 2, 3, -100.0, 4, 0.75)
        + pack("<i", 2)
        + pack("<I", 2)
        + pack("<II", 1, 7)
        + pack("<IfIIfIf", 1, -0.1, 2, 7, -0.1, 1, -3.5)
        + pack("<II", 0, 0)
    )
    found = audit_digest([0], asked, answers)
    assert found == sha256(expected).hexdigest()
    assert found == "0399f1e8d36311a42bdb7ef11bb5210fa97bf64ff2f74017d05e2d48a3332f3c"


NEXT = TokenLogprobs(-0.10000000894069672)  # the neighbour of the 32-bit -0.1
ASKED, ANSWER = Sampling(seed=1, logprobs=0), Delivered([1, 2], [TokenLogprobs(-0.1), TokenLogprobs(-1.0)])


@pytest.mark.parametrize(
    ("prompt", "asked", "answers"),
    [
        ([1, 2, 4], ASKED, [ANSWER]),
        ([1, 2], ASKED, [ANSWER]),
        ([1, 2, 3], replace(ASKED, seed=2), [ANSWER]),
        ([1, 2, 3], replace(ASKED, temperature=0.9), [ANSWER]),
        ([1, 2, 3], replace(ASKED, stop=("x",)), [ANSWER]),
        ([1, 2, 3], ASKED, [Delivered([1, 3], ANSWER.logprobs)]),
        ([1, 2, 3], ASKED, [Delivered([1, 2], [NEXT, ANSWER.logprobs[1]])]),
        ([1, 2, 3], ASKED, [ANSWER, ANSWER]),
        ([1, 2, 3], ASKED, [Delivered([1, 2])]),
    ],
)
def test_whatever_differs_is_seen(prompt, asked, answers):
    assert audit_digest(prompt, asked, answers) != audit_digest([1, 2, 3], ASKED, [ANSWER])


def test_neither_the_seed_of_greedy_answers_nor_what_exceeds_32_bits_counts():
    greedy = replace(ASKED, temperature=0.0)
    assert audit_digest([1], greedy, [ANSWER]) == audit_digest([1], replace(greedy, seed=None), [ANSWER])
    closer = Delivered(ANSWER.tokens, [TokenLogprobs(-0.10000000149011612), ANSWER.logprobs[1]])
    assert audit_digest([1], ASKED, [closer]) == audit_digest([1], ASKED, [ANSWER])


def test_digests_of_requests_that_belong_together():
    one, two = "0a" * 32, "ff" * 32
    assert joined([one]) == one
    assert joined([one, two]) == sha256(b"\x0a" * 32 + b"\xff" * 32).hexdigest()
    assert (joined([]), joined([""]), joined([one, ""])) == ("", "", "")


DOCUMENT = Path(__file__).parents[2] / "docs/how-to/deterministic-requests.md"


def test_the_document_says_what_the_code_does():
    text = DOCUMENT.read_text()
    _, _, rules = (audit.__doc__ or "").partition("\n\n")
    assert rules.strip().replace("\\\\n", "\\n") in text
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    asked = Sampling(max_tokens=8, seed=7)
    assert names["audit"]([1, 2], [3, 4, 5]) == audit_digest([1, 2], asked, [Delivered([3, 4, 5])])
