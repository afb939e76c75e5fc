"""A stand-in for `baton.engine.tp.rank_process` that writes its environment next to the store, and waits."""

import json
import os
import signal
import sys
from pathlib import Path

folder, rank = Path(json.loads(sys.argv[1])["store"]).parent, sys.argv[2]
(folder / f"part-{rank}").write_text(json.dumps(dict(os.environ)))
(folder / f"part-{rank}").rename(folder / f"environment-{rank}")
signal.pause()
