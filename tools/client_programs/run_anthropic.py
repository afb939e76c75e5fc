from anthropic import Anthropic
from check import BASE, CITY, KEY, MODEL, check

client = Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
ask = [{"role": "user", "content": "The capital of France is"}]


@check("message")
def _():
    return client.messages.create(model=MODEL, messages=ask, max_tokens=8).content[0].text


@check("stream")
def _():
    with client.messages.stream(model=MODEL, messages=ask, max_tokens=8) as stream:
        return stream.get_final_message().usage.output_tokens


@check("tools")
def _():
    tool = {"name": "weather", "description": "the weather", "input_schema": CITY}
    reply = client.messages.create(model=MODEL, messages=ask, max_tokens=64, tools=[tool], tool_choice={"type": "any"})
    return reply.stop_reason == "tool_use"
