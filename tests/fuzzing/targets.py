"""What must hold for whatever arrives: a value that the next in line can use, or an error that names what is wrong.

A target, here all of them by name, reads bytes as they come over the wire, or what hypothesis draws. None of them
starts a process.
`tools/fuzz_parse.py` searches them, led by coverage; `tests/unit/test_fuzzing.py` calls them briefly.
"""

from __future__ import annotations

from tests.fuzzing.cluster_file import CONFIG
from tests.fuzzing.common import Target
from tests.fuzzing.peers import PEER
from tests.fuzzing.requests import GENERATE, HTTP
from tests.fuzzing.templates import TEMPLATE

TARGETS: dict[str, Target] = {"generate": GENERATE, "http": HTTP, "template": TEMPLATE, "config": CONFIG, "peer": PEER}
