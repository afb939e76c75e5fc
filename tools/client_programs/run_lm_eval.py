import json
import os
import sys
import tempfile
from pathlib import Path

from check import MODEL, V1, check

FOLDER = sys.argv[3]  # of the model, for its tokenizer
PROMPTS = ("The capital of France is", "The color of dog", "Hello, my name is", "Two and two are", "A", "Birds can")
ROWS = [{"q": prompt, "a": " Paris", "b": " a dog that can fly", "gold": 0} for prompt in PROMPTS]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
output_type: {kind}
{more}
"""
CHOICE = 'doc_to_choice: "{{[a, b]}}"\ndoc_to_target: gold\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]'
UNTIL = (
    'doc_to_target: "{{a}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]'
)


def evaluated(kind, more, backend="local-completions", arguments=None):
    """Return the results of a task, and the answers to its requests."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    served = {
        "model": MODEL,
        "base_url": f"{V1}/completions",
        "tokenizer": FOLDER,
        "num_concurrent": 1,
        "max_retries": 1,
    }
    with tempfile.TemporaryDirectory() as place:
        os.environ["HF_DATASETS_CACHE"] = place
        data = Path(place) / "data.json"
        data.write_text("\n".join(map(json.dumps, ROWS)))
        (Path(place) / "task.yaml").write_text(TASK.format(name=f"small_{kind}", kind=kind, data=data, more=more))
        found = lm_eval.simple_evaluate(
            model=backend,
            model_args=arguments or served,
            tasks=[f"small_{kind}"],
            task_manager=TaskManager(include_path=place, include_defaults=False),
            bootstrap_iters=0,
        )
    return str(found["results"]), [sample["resps"] for sample in found["samples"][f"small_{kind}"]]


@check("generate_until")
def _():
    return "exact_match" in evaluated("generate_until", UNTIL)[0]


@check("loglikelihood (multiple choice)")
def _():
    return "acc" in evaluated("multiple_choice", CHOICE)[0]


@check("scores of the hf backend")
def _():
    own, theirs = (
        [float(score) for answers in found for ((score, _),) in answers]
        for found in (
            evaluated("multiple_choice", CHOICE)[1],
            evaluated("multiple_choice", CHOICE, "hf", {"pretrained": FOLDER, "dtype": "float32", "device": "cpu"})[1],
        )
    )
    difference = max(abs(one - other) for one, other in zip(own, theirs, strict=True))
    assert difference < 1e-3, f"log-likelihoods differ by {difference}: {own} and {theirs}"
    return own
