import json
import subprocess
import sys
import tempfile
from pathlib import Path

from check import BASE, check

FOLDER = sys.argv[3]  # of the model, for its tokenizer
REQUESTS, PROMPT, ANSWER = 12, 32, 16
PROGRAM = Path(sys.executable).parent / "guidellm"


def benchmark(kind):
    """Return the requests of a run of guidellm's command line: successful, and all others."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        arguments = [
            *("--backend", f"kind=openai_http,target={BASE},request_format={kind}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={FOLDER}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}"),
            *("--output", f"kind=json,path={report}", "--disable-progress"),
        ]
        subprocess.run([PROGRAM, "run", *arguments], cwd=place, stdout=subprocess.DEVNULL, check=True)
        found = json.loads(report.read_text())["benchmarks"][0]["requests"]
    return found["successful"], found["errored"] + found["incomplete"]


def complete(kind):
    """Check that all requests succeed, and return the different token counts of prompts and answers."""
    good, bad = benchmark(kind)
    assert (len(good), bad) == (REQUESTS, []), (len(good), bad)
    return {(each["input_metrics"]["text_tokens"], each["output_metrics"]["text_tokens"]) for each in good}


@check("completions")
def _():
    return complete("/v1/completions") == {(PROMPT, ANSWER)}


@check("streamed chat completions")
def _():
    return {answer for _, answer in complete("/v1/chat/completions")} == {ANSWER}
