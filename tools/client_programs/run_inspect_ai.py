import os
import tempfile

from check import KEY, MODEL, V1, check
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes


def solved(name, **environment):
    os.environ.update(environment)
    task = Task([Sample("The capital of France is", target="Paris")], scorer=includes())
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=name, max_tokens=8, display="none", log_dir=logs, retry_on_error=0, max_retries=0)
    if log.status != "success":
        raise RuntimeError(str(log.error.message if log.error else log.status))
    return True


@check("openai-api/")
def _():
    return solved(f"openai-api/baton/{MODEL}", BATON_BASE_URL=V1, BATON_API_KEY=KEY)


@check("vllm/")
def _():
    return solved(f"vllm/{MODEL}", VLLM_BASE_URL=V1, VLLM_API_KEY=KEY)


@check("openai/ (responses)")
def _():
    return solved(f"openai/{MODEL}", OPENAI_BASE_URL=V1, OPENAI_API_KEY=KEY)
