"""All targets by name."""

from __future__ import annotations

from tests.fuzzing.cluster_file import CONFIG
from tests.fuzzing.common import Target
from tests.fuzzing.peers import PEER
from tests.fuzzing.requests import GENERATE, HTTP
from tests.fuzzing.templates import TEMPLATE

TARGETS: dict[str, Target] = {
    "generate": GENERATE,
    "http": HTTP,
    "template": TEMPLATE,
    "config": CONFIG,
    "peer": PEER,
}
