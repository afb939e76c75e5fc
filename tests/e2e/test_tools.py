"""The demo model with a chat template that has tools, which it was never trained for: it calls what it is told to."""

import json
import shutil
from pathlib import Path

import openai
import pytest
from openai import OpenAI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "How is the weather in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(module_home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(ROOT / "models" / "demo", folder)
    template = (ROOT / "tests" / "unit" / "router" / "templates" / "qwen.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    with module_home.cluster("configs/no-ray.yaml", f"model.path={folder}") as cluster:
        url = f"http://{cluster.state().http}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as made:
            yield made


def ask(client, messages=QUESTION, **options):
    asked = {"model": "", "messages": messages, "tools": [WEATHER], "max_tokens": 128, "temperature": 0, **options}
    return client.chat.completions.create(**asked)


def test_a_forced_call_and_its_answer(client):
    (choice,) = ask(client, tool_choice="required").choices
    (call,) = choice.message.tool_calls
    found = json.loads(call.function.arguments)
    assert (choice.finish_reason, call.function.name, found.keys()) == ("tool_calls", "weather", {"city", "days"})
    assert found["city"] in {"Rome", "Paris"}
    assert found["days"] in range(1, 10)

    told = "".join(
        call.function.arguments
        for chunk in ask(client, tool_choice="required", stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    )
    assert told == call.function.arguments, "streamed or not"

    turns = [*QUESTION, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    answer = ask(client, turns)
    assert answer.usage.prompt_tokens > ask(client).usage.prompt_tokens


def test_what_no_call_can_be(client):
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"x": {"type": "odd"}}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tools=[odd], tool_choice="required")
    assert refused.value.param == "tools"
