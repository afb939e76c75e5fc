from typing import Literal

import outlines
from check import KEY, MODEL, V1, check
from openai import OpenAI
from outlines.types import Regex
from pydantic import BaseModel, ConfigDict

client = OpenAI(base_url=V1, api_key=KEY)


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


@check("from_openai: JSON schema")
def _():
    model = outlines.from_openai(client, MODEL)
    return Place.model_validate_json(model("The capital of France is", Place, max_tokens=64)).city


@check("from_vllm: JSON schema")
def _():
    return Place.model_validate_json(outlines.from_vllm(client, MODEL)("The capital of", Place, max_tokens=64)).city


@check("from_vllm: regex")
def _():
    return outlines.from_vllm(client, MODEL)("A number", Regex("[0-9]{3}"), max_tokens=8).isdecimal()


@check("from_vllm: choice")
def _():
    return outlines.from_vllm(client, MODEL)("The capital is", Literal["Paris", "Rome"], max_tokens=8) in {
        "Paris",
        "Rome",
    }
