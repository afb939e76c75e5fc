from check import CITY, KEY, MODEL, V1, check
from openai import OpenAI

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
ask = [{"role": "user", "content": "The capital of France is"}]
tool = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": CITY}}


@check("completion")
def _():
    return (
        client.completions.create(model=MODEL, prompt="The color of dog", max_tokens=8, temperature=0).choices[0].text
    )


@check("chat")
def _():
    return client.chat.completions.create(model=MODEL, messages=ask, max_tokens=8).choices[0].message.content


@check("stream with usage")
def _():
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=ask, max_tokens=8, stream=True, stream_options=options)
    )
    return chunks[-1].usage.completion_tokens


@check("JSON schema")
def _():
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    reply = client.chat.completions.create(model=MODEL, messages=ask, max_tokens=64, response_format=wanted)
    return "city" in reply.choices[0].message.content


@check("tools")
def _():
    how = {"model": MODEL, "max_tokens": 64, "tools": [tool]}
    reply = client.chat.completions.create(messages=ask, tool_choice="required", **how)
    (call,) = reply.choices[0].message.tool_calls
    turns = [*ask, reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "18"}]
    last = client.chat.completions.create(messages=turns, tool_choice="none", **how)
    return call.function.name == "weather" and last.choices[0].finish_reason


@check("responses")
def _():
    return client.responses.create(model=MODEL, input="The capital of France is", max_output_tokens=16).output_text


@check("prompt log-probabilities (echo)")
def _():
    reply = client.completions.create(model=MODEL, prompt="The color of dog", max_tokens=0, echo=True, logprobs=1)
    return len(reply.choices[0].logprobs.token_logprobs) > 1
