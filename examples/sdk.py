"""Streams one answer over gRPC with the SDK, and prints where its time went. Usage: python sdk.py [HOST:PORT]"""

import sys

from baton import Client

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(address, timeout=60) as client, client.stream("The color of dog", max_tokens=8, temperature=0) as stream:
    for delta in stream:
        print(delta.text, end="", flush=True)
    answer = stream.collect()

timings, placement = answer.timings, answer.placement
print(f"\nfirst token after {timings.ttft_s * 1e3:.1f} ms, all after {timings.e2e_s * 1e3:.1f} ms")
print(f"prefill on {placement.prefill_worker}, decode on {placement.decode_worker}", end=", ")
print(f"{placement.kv_bytes} bytes of KV moved")
