"""OpenAI's HTTP API: the gateway. It translates to `baton.v1.Inference`, schedules nothing, and connects to no worker.

Read `server` (uvicorn) and `app` (paths) first, then follow a request. `parsing` and `schema` type its body;
`endpoints` and `job` make router calls; `upstream` runs them as one stream; `responses` writes the answer.
`chat_responses` and `tool_calls` format chat choices. `loopback` is the router's socket for a gateway in its process.
"""
