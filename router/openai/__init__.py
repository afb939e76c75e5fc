"""OpenAI's HTTP API in front of `baton.v1.Inference`: a translator. It schedules nothing and knows no worker."""
