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
    " --decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --data-parallel-start-rank -dpn -dpr"
    " -dpl -dpa --data-parallel-rpc-port -dpp --data-parallel-backend -dpb --data-parallel-hybrid-lb -dph -dpe"
    " --data-parallel-external-lb --master-addr --master-port --nnodes -n --node-rank -r --enable-eplb --eplb-config"
    " --all2all-backend --expert-placement-strategy --enable-dbo --ubatch-size --max-parallel-loading-workers"
    " --ray-workers-use-nsight --worker-cls --worker-extension-cls --scheduler-cls --stream-interval --convert"
    " --attention-config -ac --kernel-config --optimization-level --performance-mode --additional-config -asc"
    " --moe-backend --cuda-graph-sizes --cudagraph-capture-sizes --max-cudagraph-capture-size --max-seq-len-to-capture"
    " --disable-cascade-attn --disable-hybrid-kv-cache-manager --calculate-kv-scales --kv-sharing-fast-prefill"
    " --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --kv-offloading-size"
    " --kv-offloading-backend --kv-cache-dtype-skip-layers --max-num-partial-prefills --max-long-partial-prefills"
    " --num-lookahead-slots --use-v2-block-manager --pooler-config --override-pooler-config --io-processor-plugin"
    " --skip-tokenizer-init --enable-prompt-embeds --hf-config-path --allowed-local-media-path --allowed-media-domains"
    " --enable-mm-embeds --media-io-kwargs --mm-processor-cache-gb --mm-processor-cache-type --mm-encoder-tp-mode"
    " --mm-encoder-attn-backend --disable-mm-preprocessor-cache --interleave-mm-strings --skip-mm-profiling"
    " --language-model-only --video-pruning-rate --enable-multimodal-encoder-data-parallel --disable-chunked-mm-input"
    " --enable-lora-bias --lora-extra-vocab-size --lora-dtype --max-cpu-loras --fully-sharded-loras --default-mm-loras"
    " --long-lora-scaling-factors --ec-transfer-config --show-hidden-metrics-for-version --kv-cache-metrics"
    " --cudagraph-metrics --enable-mfu-metrics --enable-layerwise-nvtx-tracing --safetensors-load-strategy"
    " --model-loader-extra-config --ignore-patterns --use-tqdm-on-load --pt-load-map-location --profiler-config"
    " --enable-ssl-refresh --ssl-ciphers --h11-max-header-count --h11-max-incomplete-event-size --log-error-stack"
    " --enable-log-deltas --disable-frontend-multiprocessing --tokens-only --enable-offline-docs"
    " --reasoning-parser-plugin --trust-request-chat-template"
)
THERE = {
    "--model": "the first word, as in baton serve MODEL",
    "--revision": "MODEL@REVISION",
    "--tokenizer-revision": "MODEL@REVISION",
    "--code-revision": "never: no code of a checkpoint runs",
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
    "--ssl-cert-reqs": "--set security.tls=FOLDER",
    "--otlp-traces-endpoint": "--set tracing.otlp=URL",
    "--collect-detailed-traces": "--set tracing.otlp=URL",
    "--disable-log-requests": "prompts are never logged; --set log.level=warning",
    "--enable-log-outputs": "answers are never logged",
    "--enable-log-requests": "--set log.level=debug; prompts are never logged",
    "--uvicorn-log-level": "--set log.level=LEVEL",
    "--seed": "the field seed of each request",
    "--enable-auto-tool-choice": "always on",
    "--exclude-tools-when-tool-choice-none": "always on",
    "--enable-tokenizer-info-endpoint": "/tokenize and /v1/models are always on",
    "--enable-request-id-headers": "always on: the header x-request-id",
    "--enable-force-include-usage": "the field stream_options.include_usage of each request",
    "--logprobs-mode": "always raw_logprobs",
    "--device-ids": "--device cuda:N",
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
# Click would find Baton's -c and -d in these, or report a part of one.
_SHORT = "|".join(name for name in THERE if re.fullmatch("-[a-z]{2,}", name))
LIKE_OWN = re.compile(rf"({_SHORT})(\d+|(\.[^=]*)?=.*)?", re.DOTALL)


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
