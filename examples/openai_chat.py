"""Holds a conversation with the openai package, streaming its end. Usage: python openai_chat.py [BASE_URL]"""

import sys

from openai import OpenAI

base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{base}/v1", api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "user", "content": "The capital of France is"}]
reply = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
print(reply.choices[0].message.content)

messages += [reply.choices[0].message, {"role": "user", "content": "The capital of Italy is"}]
for chunk in client.chat.completions.create(
    model=model, messages=messages, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} new ones")
