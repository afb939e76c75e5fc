"""The cluster file and `--set`: a config, or a `ConfigError`."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from baton.config.loading import config_from_json, known_keys, load_config
from baton.errors import ConfigError
from tests.fuzzing.common import FREELY, ROOT, Target, outcome

_VALUES = ["", "{a: b}", *"~ auto oracle 1GiB 0 -1 2.5 .inf 127.0.0.1:0 [] {} [x] *a".split()]
_KEYS = "model name router http path redis prefill replicas queue x".split()
_PIECES = [
    *(f"{key}: " for key in _KEYS),
    *("? ", "\n", "\n  ", "\n    ", "- ", ": ", ", ", "&a ", "*a", "&b ", "*b", "<<: ", "---\n", "# x\n", *"{}[]"),
    *(f"!!{tag} " for tag in "int float bool timestamp binary map set str null".split()),
    *("!x ", "9" * 5000, "[" * 300, *"2001-99-99 2001-01-01 1e999 0x 0o9 .nan - ~ yes ''".split(), '"\\ud800"'),
    *("oracle", "local", "127.0.0.1:0", "1GiB", "'", '"', "|\n", ">\n", "%YAML 9\n", "\t", "\x00", "\x85", "\ufeff"),
]
_FOLDER = tempfile.TemporaryDirectory(prefix="baton-fuzz-")  # deleted with the process
_FILE = Path(_FOLDER.name) / "cluster.yaml"


def from_text(text: str, sets: tuple[str, ...] = ()) -> None:
    """A config reaches another process unchanged; an error names the file, or the option that was wrong."""
    _FILE.write_text(text, encoding="utf-8")
    config, error = outcome(lambda: load_config(_FILE, sets), ConfigError)
    if config is None:
        assert str(error).startswith((str(_FILE), "--set "))
    else:
        assert config_from_json(config.model_dump_json()) == config


def from_bytes(data: bytes) -> None:
    from_text(data.decode("utf-8", "replace"))


_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=20).map("".join)
_SETS = st.tuples(st.sampled_from(known_keys()), st.sampled_from(_VALUES + _PIECES) | st.text(max_size=9))


@FREELY
@given(st.just("{name: x, model: {path: oracle}}") | _TEXTS, st.lists(_SETS, max_size=4))
def drawn(text, pairs):
    from_text(text, tuple(f"{key}={value}" for key, value in pairs))


_FILES = sorted((ROOT / "configs").glob("*.yaml"))
CONFIG = Target(from_bytes, drawn, [path.read_bytes() for path in _FILES])
