"""Options of `vllm serve` that `baton serve` lacks, with the words of Baton for the same (docs/how-to/from-vllm.md)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import typer
from typer.core import TyperCommand

NONE = "Baton has no such option"
BOTH = "--set prefill.{0} --set decode.{0}"
# Further options of vLLM. Most of them tune its engine, its GPUs or its web server.
MISSING = (
    "--enable-lora --lora-modules --max-loras --max-lora-rank --limit-mm-per-prompt --mm-processor-kwargs"
    " --cpu-offload-gb --swap-space --pipeline-parallel-size -pp --enable-expert-parallel -ep --compilation-config"
    " -O -cc --attention-backend --async-scheduling --enable-sleep-mode --disable-log-stats --uds --headless"
    " --middleware --tokenizer-mode --config-format --model-impl --response-role --chat-template-content-format"
    " --tool-server --tool-parser-plugin --log-config-file --max-log-len --disable-uvicorn-access-log"
    " --disable-fastapi-docs --allow-credentials --allowed-methods --allowed-headers --enable-server-load-tracking"
    " --return-tokens-as-token-ids --num-gpu-blocks-override --prefix-caching-hash-algo --preemption-mode"
    " --disable-sliding-window --data-parallel-size-local --data-parallel-rank --data-parallel-address"
    " --disable-custom-all-reduce --kv-events-config --logits-processors --num-scheduler-steps --rope-theta"
)
THERE = {
    "--model": "the first word, as in baton serve MODEL",
    "--revision": "MODEL@REVISION",
    "--download-dir": "the environment variable HF_HOME",
    "--gpu-memory-utilization": BOTH.format("kv_memory=SIZE"),
    "--kv-cache-memory-bytes": BOTH.format("kv_memory=SIZE"),
    "--block-size": BOTH.format("block_size=N"),
    "--max-num-seqs": BOTH.format("max_running=N"),
    "--max-num-batched-tokens": BOTH.format("max_batched_tokens=N"),
    "--enable-chunked-prefill": "always on",
    "--enable-prefix-caching": "on by default; " + BOTH.format("prefix_cache=false"),
    "--no-enable-prefix-caching": BOTH.format("prefix_cache=false"),
    "--scheduling-policy": "always by priority; a higher number runs first",
    "--tensor-parallel-size": BOTH.format("tensor_parallel=N"),
    "-tp": BOTH.format("tensor_parallel=N"),
    "--data-parallel-size": "--decode N",
    "-dp": "--decode N",
    "--api-server-count": "--set router.replicas=N",
    "--distributed-executor-backend": "--set ray.address=local",
    "--quantization": "--quantize int8 or int4; quantised checkpoints need no option",
    "-q": "--quantize int8 or int4; quantised checkpoints need no option",
    "--kv-cache-dtype": "--set model.kv_dtype=int8",
    "--speculative-config": "--set decode.speculation=auto, ngram, mtp or draft:PATH",
    "--kv-transfer-config": "not needed: prefill and decode are separate already; --set transfer.transport=NAME",
    "--ssl-certfile": "--set security.tls=FOLDER",
    "--ssl-keyfile": "--set security.tls=FOLDER",
    "--ssl-ca-certs": "--set security.tls=FOLDER",
    "--otlp-traces-endpoint": "--set tracing.otlp=URL",
    "--disable-log-requests": "prompts are never logged; --set log.level=warning",
    "--enable-log-requests": "--set log.level=debug; prompts are never logged",
    "--uvicorn-log-level": "--set log.level=LEVEL",
    "--seed": "the field seed of each request",
    "--enable-auto-tool-choice": "always on",
    "--tool-call-parser": "found in the chat template, or --set router.tool_parser=NAME",
    "--structured-outputs-config": "always llguidance",
    "--max-logprobs": "always 20",
    "--long-prefill-token-threshold": BOTH.format("max_batched_tokens=N"),
    "--guided-decoding-backend": "always llguidance",
    "--override-generation-config": "fields of each request, or edit generation_config.json",
    "--default-chat-template-kwargs": "the field chat_template_kwargs of each request",
    "--hf-token": "the environment variable HF_TOKEN",
    "--runner": "always generation of text",
    "--task": "always generation of text",
    "--enable-prompt-tokens-details": "always on",
    "--enforce-eager": "not needed: graphs are captured where they work",
    "--tokenizer": "read from the checkpoint's folder",
    "--chat-template": "read from the checkpoint's folder",
    "--hf-overrides": "edit config.json",
    "--rope-scaling": "edit config.json",
    "--load-format": "by the files of the model: safetensors or GGUF",
    "--trust-remote-code": "never: no code of a checkpoint runs",
    "--reasoning-parser": "found in the chat template, or --set router.reasoning_parser=NAME",
    "--generation-config": "--set model.generation_defaults=none, or model, the default",
    "--allowed-origins": "--set router.http_origins=[ORIGIN]",
    "--root-path": NONE,
    **dict.fromkeys(MISSING.split(), NONE),
}
LIKE_OWN = re.compile(r"-(cc|dp)((\.[^=]*)?=.*)?", re.DOTALL)  # click would find Baton's -c and -d


class ServeCommand(TyperCommand):
    """`baton serve`, which answers options of `vllm serve` by itself."""

    allow_extra_args = ignore_unknown_options = True

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse `args`. Raises typer.BadParameter for a short option of vLLM that begins like one of Baton."""
        reject_unknown([word for word in args if LIKE_OWN.fullmatch(word)][:1], ())
        return super().parse_args(ctx, args)


def reject_unknown(words: Sequence[str], options: Sequence[str]) -> None:
    """Raise typer.BadParameter for the first of the `words` that `baton serve` left over. `options` are its own."""
    option = next((re.split("[=.]", word)[0] for word in words if word[:1] == "-"), None)  # others may be its value
    if option is not None:
        plain = option.replace("_", "-") if option.startswith("--") else option.rstrip("0123456789")  # -O3
        known = THERE.get(plain) or THERE.get(plain.replace("--no-", "--", 1))
        near = difflib.get_close_matches(option, options, n=1)
        advice = f"did you mean {near[0]}?" if near else "see baton serve --help"
        in_baton = known if known in {None, NONE} else f"an option of vLLM; in Baton: {known}"
        raise typer.BadParameter(f"{option}: {in_baton or f'no such option; {advice}'}")
    if words:
        raise typer.BadParameter(f"{words[0]}: one model only; repeat --served-model-name for further names")
