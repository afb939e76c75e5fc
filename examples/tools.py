"""Runs a whole round with a tool: the model calls it, this program runs it, the model answers with its result. The chat
template of the model must take tools. Usage: python tools.py [BASE_URL]
"""

import json
import sys

from openai import OpenAI


def weather(city: str) -> str:
    """Return the weather of a city; a real program would look it up."""
    return json.dumps({"city": city, "celsius": {"Paris": 18, "Rome": 25}[city]})


base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{base}/v1", api_key="none")
model = client.models.list().data[0].id
parameters = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": parameters}}

messages = [{"role": "user", "content": "What is the weather in the capital of France?"}]
first = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[tool],
    tool_choice="required",  # a model that was trained for tools needs only "auto", the default
    max_tokens=64,
    temperature=0,
)
messages.append(first.choices[0].message)
for call in first.choices[0].message.tool_calls:
    result = weather(**json.loads(call.function.arguments))
    print(call.function.name, call.function.arguments, "->", result)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
last = client.chat.completions.create(model=model, messages=messages, tools=[tool], tool_choice="none", max_tokens=32)
print(last.choices[0].message.content)
