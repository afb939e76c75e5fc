"""Markdown for the guards: commands that users type, links, and the anchors of headings."""

import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile, groupby, takewhile

SHELLS = {"", "sh", "bash", "shell", "console"}  # the languages of fences with commands
FENCE = re.compile(r"^[ \t]*```(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
LINE = re.compile(r"(?:.*\\\n)*.*")  # with continuation lines after backslashes
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]\n]+\]:[ \t]*<?([^\s>]+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)(?:[ \t]+#+)?[ \t]*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
OPTIONAL = re.compile(r"\[[^][]*\]")
BEFORE = re.compile(r"\$|[A-Z_]\w*=.*", re.DOTALL)  # a prompt, and a command's environment variables


@dataclass(frozen=True)
class Said:
    """A text of a document and its place, `file:line`."""

    where: str
    text: str


@dataclass(frozen=True)
class Document:
    """A Markdown file. `name` is its path from the root, with slashes."""

    name: str
    text: str

    def said(self, at: int, text: str) -> Said:
        return Said(f"{self.name}:{self.text.count(chr(10), 0, at) + 1}", text)

    @cached_property
    def prose(self) -> str:
        """The text with all fences replaced by blanks."""
        return FENCE.sub(_blank, self.text)

    def code(self) -> Iterator[Said]:
        """Yield the lines in shell fences, and all text between backticks."""
        for fence in FENCE.finditer(self.text):
            lines = LINE.finditer(self.text, *fence.span(2)) if fence[1] in SHELLS else ()
            yield from (self.said(line.start(), line[0].replace("\\\n", " ")) for line in lines)
        yield from (self.said(span.start(), span[2].replace("\n", " ")) for span in SPAN.finditer(self.prose))

    def fences(self) -> Iterator[tuple[str, str]]:
        """Yield language and text of each fence, in order."""
        yield from ((fence[1], fence[2]) for fence in FENCE.finditer(self.text))

    def links(self) -> Iterator[Said]:
        text = SPAN.sub(_blank, self.prose)
        for found in (*LINK.finditer(text), *REFERENCE.finditer(text)):
            if not ELSEWHERE.match(found[1]):
                yield self.said(found.start(), found[1])

    def resolved(self, link: str) -> tuple[str, str]:
        path, _, anchor = link.partition("#")
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.name), path)) if path else self.name, anchor

    def anchors(self) -> set[str]:
        """Return the anchors of its headings, as GitHub forms them."""
        seen: Counter[str] = Counter()
        found = set[str]()
        for heading in HEADING.findall(self.prose):
            text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        return found


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def commands(line: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell line as words, without comments, redirections and `[]` of optional parts.

    A bar within such brackets, and the escaped one of a table's cell, is an "or".
    """
    line = OPTIONAL.sub(lambda found: found[0].replace("|", " or "), line.replace("\\|", "|"))
    for ends, words in groupby(_words(line), lambda word: bool(word) and set(word) <= set("();|&")):
        if not ends:
            kept = takewhile(lambda word: not (word and set(word) <= set("<>&")), words)
            yield list(dropwhile(BEFORE.fullmatch, filter(None, (word.strip("[]") for word in kept))))


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quotation that ends in another line
        return line.split()
