"""The groups of commands in `baton --help`, and the examples in `baton COMMAND --help`."""

from __future__ import annotations

PANELS = {
    "Start and stop": ("serve", "up", "down", "demo", "pull"),
    "Send requests": ("generate", "chat", "replay", "bench"),
    "Observe": ("status", "top", "logs", "trace"),
    "Change a running cluster": ("scale", "drain", "restart"),
    "Set up and check": ("doctor", "config", "certs"),
    "Measure and size": ("plan", "profile", "quantize"),
    "Single roles": ("router", "prefill-worker", "decode-worker", "gateway", "controller"),
}
EXAMPLES = {
    "serve": ("serve Qwen/Qwen3-0.6B --port 8000", "serve ./my-model --prefill 1 --decode 2 --detach"),
    "up": ("up -c configs/local.yaml --detach", "up -c configs/no-ray.yaml --set decode.replicas=2"),
    "down": ("down", "down --name local"),
    "demo": ("demo", "demo --no-stay"),
    "pull": ("pull hf:Qwen/Qwen3-0.6B",),
    "generate": (
        'generate "The color of dog" --show timings,tokens',
        "generate - --max-tokens 200 --stop END --json < prompt.txt",
        'generate "Hello" --deterministic --seed 7 --temperature 1',
    ),
    "chat": ('chat --system "Answer in one sentence."',),
    "replay": ("replay receipt.json --prompt prompt.txt", "replay receipts/ --verify-only --public-key public.pem"),
    "bench": (
        "bench --concurrency 8 --requests 100",
        "bench --rate 5 --prompt-tokens 512 --max-tokens 64 --out a.json",
    ),
    "status": ("status", "status --watch", "status --json"),
    "top": ("top", "top --target 10.0.0.5:7001 --tls certs"),
    "logs": ("logs --follow --level warning", "logs --since 5m --worker decode-0"),
    "trace": ("trace", "trace --out trace.json"),
    "scale": ("scale prefill=2 decode=3 --wait 60",),
    "drain": ("drain decode-0 --wait 60", "drain --here -c cluster.yaml"),
    "restart": ("restart --wait 300",),
    "doctor": ("doctor", "doctor -c cluster.yaml --transport auto"),
    "certs": ("certs certs --host router.example --host 10.0.0.5",),
    "plan": ("plan --profile opt-13b-a100 --rate 5", "plan --profile my.json --rate 20 -c cluster.yaml"),
    "profile": ("profile -c configs/local.yaml", "profile --live my.json --seconds 60"),
    "quantize": ("quantize ./my-model ./my-model-int8",),
    "router": ("router -c cluster.yaml --set redis.url=redis://127.0.0.1:6379/0",),
    "prefill-worker": ("prefill-worker -c cluster.yaml --index 0",),
    "decode-worker": ("decode-worker -c cluster.yaml --index 1",),
    "gateway": ("gateway -c cluster.yaml --target 10.0.0.5:50051",),
    "controller": ("controller -c cluster.yaml", "controller -c cluster.yaml --stop"),
}


def panel(command: str) -> str:
    """Return the group of a command."""
    return next(name for name, commands in PANELS.items() if command in commands)


def epilog(command: str) -> str | None:
    """Return the examples of a command as the end of its help, where an empty line ends a line."""
    return (
        "\n\n".join(["Examples:", *(f"  baton {line}" for line in EXAMPLES[command])]) if command in EXAMPLES else None
    )
