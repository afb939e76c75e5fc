import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from check import BASE, MODEL, check

FOLDER = sys.argv[3]  # of the model, for its tokenizer
REQUESTS, PROMPT, ANSWER = 12, 32, 16
PROGRAM = Path(sys.executable).parent / "aiperf"
# It accepts no folder as tokenizer if HF_HUB_OFFLINE is set.
ENV = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}


def profile(kind, *more):
    """Return the results of a run of aiperf's command line."""
    with tempfile.TemporaryDirectory() as place:
        arguments = [
            *("--model", MODEL, "--url", BASE, "--endpoint-type", kind, "--tokenizer", FOLDER),
            *("--concurrency", "2", "--request-count", str(REQUESTS)),
            *("--synthetic-input-tokens-mean", str(PROMPT), "--synthetic-input-tokens-stddev", "0"),
            *("--output-tokens-mean", str(ANSWER), "--extra-inputs", f"min_tokens:{ANSWER}", *more),
            *("--ui", "none", "--output-artifact-dir", place),
        ]
        subprocess.run([PROGRAM, "profile", *arguments], cwd=place, env=ENV, stdout=subprocess.DEVNULL, check=True)
        return json.loads((Path(place) / "profile_export_aiperf.json").read_text())


def complete(found):
    """Check that all requests succeeded."""
    counts = found["request_count"]["avg"], found.get("error_request_count", {"avg": 0})["avg"]
    assert counts == (REQUESTS, 0), counts
    return found


@check("streamed chat completions")
def _():
    return complete(profile("chat", "--streaming"))


@check("token counts of completions")
def _():
    found = complete(profile("completions"))
    prompt, answer = found["usage_prompt_tokens"], found["usage_completion_tokens"]
    assert prompt["min"] == prompt["max"] == found["input_sequence_length"]["max"] == PROMPT, prompt
    return answer["min"] == answer["max"] == ANSWER
