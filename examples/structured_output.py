"""Asks for an answer that fits a JSON schema, and for one that fits a regular expression. The model can only draw
tokens that fit. Usage: python structured_output.py [BASE_URL]
"""

import json
import sys

from openai import OpenAI

base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{base}/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "The capital of France is"}]
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "coast": {"type": "boolean"}},
    "required": ["city", "coast"],
    "additionalProperties": False,
}
reply = client.chat.completions.create(
    model=model,
    messages=messages,
    response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    max_tokens=64,
    temperature=0,
)
place = json.loads(reply.choices[0].message.content)
print(place["city"], place["coast"])

reply = client.chat.completions.create(
    model=model, messages=messages, extra_body={"structured_outputs": {"regex": "[A-Z][a-z]{3,8}"}}, max_tokens=16
)
print(reply.choices[0].message.content)
