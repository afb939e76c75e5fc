"""Sends a deterministic request alone and under load, and compares the audit digests: equal digests mean equal bits, of
tokens and of log-probabilities. Usage: python audit.py [BASE_URL]
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

LOAD = 8  # other requests at the same time
base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{base}/v1", api_key="none")
model = client.models.list().data[0].id


def audited():
    """Return text, audit digest and system fingerprint of a deterministic answer."""
    reply = client.completions.create(
        model=model, prompt="Mia has a red ball.", max_tokens=32, temperature=1, seed=7, logprobs=2,
        extra_body={"deterministic": True},
    )  # fmt: skip
    return reply.choices[0].text, reply.usage.audit_digest, reply.system_fingerprint


def other(number):
    """Send a request that only makes load."""
    client.completions.create(model=model, prompt=f"Number {number}", max_tokens=64, temperature=1)


alone = audited()
with ThreadPoolExecutor(LOAD) as pool:
    others = [pool.submit(other, number) for number in range(LOAD)]
    under_load = audited()
    for each in others:
        each.result()
print(alone[0].strip())
print("digest alone     ", alone[1])
print("digest under load", under_load[1])
if alone[2] == under_load[2] and alone != under_load:
    sys.exit("equal fingerprints, but other bits")
