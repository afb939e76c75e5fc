from typing import Literal

from check import CITY, KEY, MODEL, V1, check
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

chat = ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, max_completion_tokens=64, temperature=0)
ask = "The capital of France is"


@check("completion")
def _():
    return OpenAI(model=MODEL, base_url=V1, api_key=KEY, max_tokens=8).invoke("The color of dog")


@check("chat")
def _():
    return chat.invoke(ask).usage_metadata["output_tokens"]


@check("stream")
def _():
    return "".join(part.content for part in chat.stream(ask))


@check("batch")
def _():
    return len(chat.batch([ask, ask])) == 2


@check("structured output")
def _():
    schema = {"title": "place", "description": "a place", **CITY}
    return chat.with_structured_output(schema, method="json_schema").invoke(ask)["city"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return "18"


@check("tools")
def _():
    bound = chat.bind_tools([weather], tool_choice="required", strict=True)  # no other keys
    first = bound.invoke(ask)
    call = first.tool_calls[0]
    turns = [HumanMessage(ask), first, ToolMessage("18", tool_call_id=call["id"], name=call["name"])]
    return chat.bind_tools([weather]).invoke(turns).response_metadata["finish_reason"]


@check("responses")
def _():
    return ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, use_responses_api=True, max_tokens=16).invoke(ask).content
