from typing import Literal

from check import KEY, MODEL, V1, check
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key=KEY))
settings = {"max_tokens": 64, "temperature": 0}
ask = "The capital of France is"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


@check("text")
def _():
    return Agent(model, model_settings=settings).run_sync(ask).output


@check("ToolOutput")
def _():
    return Agent(model, output_type=ToolOutput(Place), model_settings=settings).run_sync(ask).output.city


@check("NativeOutput")
def _():
    return Agent(model, output_type=NativeOutput(Place), model_settings=settings).run_sync(ask).output.city


@check("NativeOutput and tools")
def _():
    agent = Agent(model, output_type=NativeOutput(Place), model_settings=settings)

    async def once(context, tool):  # the toy model would call it forever
        return tool if context.run_step == 1 else None

    @agent.tool_plain(prepare=once)
    def weather(city: Literal["Paris", "Rome"]) -> str:
        return "18"

    return agent.run_sync(ask).output.city
