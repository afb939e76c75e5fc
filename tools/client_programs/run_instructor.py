from typing import Literal

import instructor
from check import KEY, MODEL, V1, check
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


def one(mode):
    client = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY), mode=mode)
    ask = [{"role": "user", "content": "The capital of France is"}]
    return client.chat.completions.create(
        model=MODEL, messages=ask, response_model=Place, max_tokens=64, temperature=0, max_retries=0
    ).city


for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    check(mode)(lambda mode=mode: one(getattr(instructor.Mode, mode)))
