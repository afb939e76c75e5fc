"""Uses a cluster from LangChain: a prompt template, a stream and a batch. Usage: python langchain_chat.py [BASE_URL]"""

import sys

import httpx
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = httpx.get(f"{base}/v1/models").json()["data"][0]["id"]
chat = ChatOpenAI(model=model, base_url=f"{base}/v1", api_key="none", temperature=0, max_completion_tokens=16)
chain = ChatPromptTemplate.from_messages([("user", "The capital of {country} is")]) | chat

print(chain.invoke({"country": "France"}).content)
for part in chain.stream({"country": "Italy"}):
    print(part.content, end="", flush=True)
print()
answers = chain.batch([{"country": name} for name in ("Spain", "Japan")])
print([answer.usage_metadata["output_tokens"] for answer in answers])
