"""OpenAI's HTTP API: the gateway. It translates to `baton.v1.Inference`, schedules nothing, and connects to no worker.

Read `server` (paths and listener) first, then follow a request. `parsing` and `schema` type its body. `job` makes the
router calls, and `upstream` runs them as one stream. `responses` writes the answer. `choices` and `tool_calls` format
its choices. `loopback` is the router's socket for a gateway in its process.
"""
