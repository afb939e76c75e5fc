#!/bin/bash
# Calls a cluster with curl: its models, a completion, a stream and a chat. Usage: bash curl.sh [BASE_URL]
set -euo pipefail

url=${1:-http://127.0.0.1:8000}
post() { curl -sS --fail-with-body -H 'content-type: application/json' "$@"; echo; }

curl -sS --fail "$url/v1/models"; echo
post "$url/v1/completions" -d '{"prompt": "The color of dog", "max_tokens": 8, "temperature": 0}'
post -N "$url/v1/completions" -d '{"prompt": "The color of dog", "max_tokens": 8, "temperature": 0, "stream": true}'
post "$url/v1/chat/completions" -d '{"messages": [{"role": "user", "content": "The capital of France is"}], "max_tokens": 8}'
