import json
import os
import sys
import tempfile
from pathlib import Path

from check import MODEL, V1, check

FOLDER = sys.argv[3]  # of the model, for its tokenizer
ROWS = [{"q": "The capital of France is", "a": " Paris", "b": " a dog", "gold": 0}] * 3
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


def evaluated(kind, more, metric):
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as place:
        os.environ["HF_DATASETS_CACHE"] = place
        data = Path(place) / "data.json"
        data.write_text("\n".join(map(json.dumps, ROWS)))
        (Path(place) / "task.yaml").write_text(TASK.format(name=f"small_{kind}", kind=kind, data=data, more=more))
        arguments = {
            "model": MODEL,
            "base_url": f"{V1}/completions",
            "tokenizer": FOLDER,
            "num_concurrent": 1,
            "max_retries": 1,
        }
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=[f"small_{kind}"],
            task_manager=TaskManager(include_path=place, include_defaults=False),
            bootstrap_iters=0,
        )
    return metric in str(found["results"])


@check("generate_until")
def _():
    return evaluated("generate_until", UNTIL, "exact_match")


@check("loglikelihood (multiple choice)")
def _():
    return evaluated("multiple_choice", CHOICE, "acc")
