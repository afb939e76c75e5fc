"""Docstrings, comments and documents keep the language rules, as far as a regular expression can see them."""

import pytest

from tools.language import Text, all_findings, findings

PRODUCT = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer", "tools")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/README.md", "docs/glossary.md", "docs/performance.md")
FOLDERS = ("docs/design", "docs/how-to", "docs/reference", "docs/tutorials", "helm/baton/README.md")
OTHERS = ("tests", "benchmarks", "examples")
BROKEN = {
    "What it sends.": "begins with",
    "It waits. Who is late is not asked.": "begins with",
    "Nobody reads it.": "not 'who'",
    "The worker tells its router.": "only people",
    "It is kept for ever.": "archaic",
    "All are read at once.": "at once",
    "Its limit; 0: none.": "ellipsis",
    "A list of what is free.": "free relative",
}


@pytest.mark.parametrize("places", [PRODUCT, (*PAGES, *FOLDERS), OTHERS], ids=["product", "pages", "others"])
def test_no_sentence_breaks_the_rules(places):
    found = list(all_findings(places, strings=False))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("sentence", BROKEN)
def test_each_rule_finds_its_pattern(sentence):
    (found, *_) = findings(Text("x.py", 1, sentence))
    assert BROKEN[sentence] in found


def test_code_and_plain_sentences_are_left_alone():
    text = "Return the blocks of `who` that it sends.\n\n>>> nobody\n\nIt waits until the worker reports."
    assert not list(findings(Text("x.py", 1, text)))
