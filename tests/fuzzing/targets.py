"""Properties for any input: a value that the next stage can use, or an error that names the problem.

A target reads raw bytes from the wire, or hypothesis draws its input. No target starts a process.

`tools/fuzz_parse.py` searches them, guided by coverage; `tests/unit/test_fuzzing.py` runs them briefly.
"""

from tests.fuzzing.cluster_file import CONFIG
from tests.fuzzing.common import Target
from tests.fuzzing.peers import PEER
from tests.fuzzing.requests import GENERATE, HTTP
from tests.fuzzing.templates import TEMPLATE

TARGETS: dict[str, Target] = {"generate": GENERATE, "http": HTTP, "template": TEMPLATE, "config": CONFIG, "peer": PEER}
