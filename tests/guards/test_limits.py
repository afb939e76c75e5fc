"""Every cap of `baton.limits` is in the reference and is used, and no caps are elsewhere."""

import re
from collections import Counter
from pathlib import Path

from baton import limits

ROOT = Path(__file__).resolve().parents[2]


def test_every_constant_is_in_the_table_and_is_used():
    names = {name for name in dir(limits) if re.fullmatch(r"(MAX|MIN)_\w+|\w+_BYTES", name)}
    source = (ROOT / "tools/reference/caps.py").read_text()
    in_table = set(re.findall(r"Cap\([^()]*?\blimits\.([A-Z_]+),", source)) | {"MIN_TOKEN_CHARS"}
    assert names == in_table
    files = (path for part in ("baton", "router") for path in (ROOT / part).rglob("*.py"))
    used = Counter(word for path in files if path.name != "limits.py" for word in re.findall(r"\w+", path.read_text()))
    assert {name for name in names if not used[name]} == set()


def test_caps_are_nowhere_else():
    """A limit for external input has its name in `baton.limits`."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("router", "baton/rpc", "baton/core.py")
        for path in ([ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py")))
        if "/v1/" not in str(path)
        for line in path.read_text().splitlines()
        if re.match(r"_?MAX_\w+( *:.*)? = ", line) or re.search(r"len\(.*\) > \d", line)
    ]
    assert not found, found
