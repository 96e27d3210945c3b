"""Habits of vLLM, and of SGLang where it has the same names."""

from streamserve.settings.habits import convert
from streamserve.settings.habits.convert import to
from streamserve.settings.habits.habit import Habit, Program

_BOTH: tuple[Program, ...] = ("vllm", "sglang")
_VLLM: tuple[Program, ...] = ("vllm",)

_PARSERS = {
    "openai": "harmony", "gpt-oss": "harmony", "phi4_mini_json": "phi4_mini", "llama3": "llama3_json",
    "llama4_pythonic": "pythonic", "qwen": "hermes", "qwen25": "hermes", "granite-20b-fc": "granite",
}  # fmt: skip
_REASONING = {"openai_gptoss": "harmony", "gpt-oss": "harmony", "deepseek-r1": "deepseek_r1"}
_MEMORY = "the KV cache takes 40 % of a CPU's free memory, or 90 % of a GPU's; {kv_cache_bytes=8GB} sets it"
_KV_VALUES = dict.fromkeys(
    ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "nvfp4", "fp4_e2m1"),
    "8 bits are integers with a scale for each token and head here: {kv_cache_dtype=int8}",
) | dict.fromkeys(
    ("float16", "bfloat16", "half", "bf16", "fp16"),
    "the KV cache has the model's data type, or 8 bits: {kv_cache_dtype=auto} or {kv_cache_dtype=int8}",
)
_QUANTIZED = dict.fromkeys(
    ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "fp8", "mxfp4", "gguf", "bitsandbytes",
     "modelopt", "torchao", "experts_int8"),
    "a quantized checkpoint says its method itself: leave this out; {quantization=int8} and "
    "{quantization=int4} round the weights of a checkpoint of 16 bits",
)  # fmt: skip

TAKEN = (
    Habit(("--model", "-m", "--model-path"), ("vllm", "sglang", "llama.cpp"), "taken",
          "MODEL, an argument of the command", to("model")),
    Habit(("--dtype",), _VLLM, "taken", "{dtype}; `half` is float16, `float` is float32",
          convert.one_of("dtype", {"half": "float16", "float": "float32"})),
    Habit(("--max-model-len",), _VLLM, "taken", "{max_model_len}; also 16k, and auto for the model's own",
          convert.length),
    Habit(("--context-length",), ("sglang",), "taken", "{max_model_len}", convert.length),
    Habit(("--tp-size", "--tp"), ("sglang",), "taken", "{tensor_parallel_size}", to("tensor_parallel_size")),
    Habit(("--data-parallel-size", "-dp", "--dp-size", "--dp"), _BOTH, "taken", "{workers}", to("workers")),
    Habit(("--kv-cache-dtype",), _VLLM, "taken", "{kv_cache_dtype}: auto or int8; fp8 is refused",
          convert.refused_values("kv_cache_dtype", _KV_VALUES)),
    Habit(("--kv-cache-memory-bytes",), _VLLM, "taken", "{kv_cache_bytes}", to("kv_cache_bytes")),
    Habit(("--num-gpu-blocks-override",), _VLLM, "taken", "{num_blocks}", to("num_blocks")),
    Habit(("--max-running-requests",), ("sglang",), "taken", "{max_num_seqs}", to("max_num_seqs")),
    Habit(("--disable-radix-cache",), ("sglang",), "taken", "{enable_prefix_caching=false}",
          convert.negated("enable_prefix_caching"), values="none"),
    Habit(("--quantization", "-q"), _BOTH, "taken",
          "{quantization}, to round a checkpoint of 16 bits; a quantized checkpoint says its method itself",
          convert.refused_values("quantization", _QUANTIZED)),
    Habit(("--speculative-config",), _VLLM, "taken",
          "{draft}, from its `model` or `method`: a small model or ngram; the policy chooses the number of "
          "draft tokens", convert.speculation),
    Habit(("--speculative-model", "--speculative-draft-model-path", "--speculative-draft-model"), _BOTH,
          "taken", "{draft}", convert.drafter),
    Habit(("--enable-lora",), _BOTH, "taken",
          "{lora=NAME=PATH}, or {max_loras} for adapters that are loaded later; alone it is {max_loras=1}",
          convert.enabled_adapters, values="none"),
    Habit(("--lora-modules", "--lora-paths"), _BOTH, "taken", "{lora=NAME=PATH}, once for each adapter",
          convert.adapters, values="several"),
    Habit(("--max-loras-per-batch",), ("sglang",), "taken", "{max_loras}", to("max_loras")),
    Habit(("--tool-call-parser",), _BOTH, "taken", "{tool_parser}, detected by default",
          convert.one_of("tool_parser", _PARSERS)),
    Habit(("--reasoning-parser",), _BOTH, "taken", "{reasoning_parser}, detected by default",
          convert.one_of("reasoning_parser", _REASONING)),
    Habit(("--runner",), _VLLM, "taken", "{task=generate} or {task=embed}, detected by default",
          convert.runner),
    Habit(("--task",), _VLLM, "taken", "{task}: generate, embed or score",
          convert.one_of("task", {"embedding": "embed"})),
    Habit(("--is-embedding",), ("sglang",), "taken", "{task=embed}",
          convert.fixed({"task": "embed"}), values="none"),
    Habit(("--hf-overrides",), _VLLM, "taken",
          "{task=score}, for the overrides that make a reranker of Qwen3-Reranker; others are refused",
          convert.reranker, quiet=({}, "{}")),
    Habit(("--allowed-origins",), _VLLM, "taken", "{cors_origin}", convert.origins),
    Habit(("--uvicorn-log-level",), _VLLM, "taken", "{log_level}", to("log_level")),
)  # fmt: skip

INSTEAD = (
    Habit(("--gpu-memory-utilization",), _VLLM, "instead", _MEMORY),
    Habit(("--mem-fraction-static",), ("sglang",), "instead", _MEMORY),
    Habit(("--seed", "-s", "--random-seed"), ("vllm", "sglang", "llama.cpp"), "instead",
          "each request has its own `seed`, in the request or in `SamplingParams(seed=…)`"),
    Habit(("--tokenizer", "--tokenizer-path"), _BOTH, "instead",
          "the tokenizer is the model's own: put its tokenizer.json into the model's folder"),
    Habit(("--revision", "--tokenizer-revision"), _BOTH, "instead",
          "a version is a part of the model's name: owner/model@REVISION"),
    Habit(("--hf-token",), ("vllm", "llama.cpp"), "instead", "the environment variable `HF_TOKEN`"),
    Habit(("--download-dir",), _BOTH, "instead", "the environment variable `HF_HOME`"),
    Habit(("--max-cpu-loras",), _VLLM, "instead", "{max_loras} is the number of loaded adapters"),
    Habit(("--long-prefill-token-threshold", "--chunked-prefill-size", "--max-prefill-tokens"), _BOTH,
          "instead", "{max_chunk} limits the tokens of a prompt in a step, {max_num_batched_tokens} those of "
          "all requests"),
    Habit(("--schedule-policy",), ("sglang",), "instead", "{order}"),
    Habit(("--max-total-tokens",), ("sglang",), "instead",
          "{num_blocks} is the size of the KV cache, in blocks of {block_size} tokens"),
    Habit(("--kv-transfer-config", "--disaggregation-mode"), _BOTH, "instead",
          "{pairs=1}: a prefill worker and a decode worker"),
    Habit(("--distributed-executor-backend",), _VLLM, "instead",
          "{launcher=ray} places workers on machines of a Ray cluster", quiet=("mp", "uni")),
    Habit(("--generation-config",), _VLLM, "instead",
          "the checkpoint's generation_config.json always gives the defaults of requests: requests that set "
          "`temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` do not depend on it",
          quiet=("auto",)),
    Habit(("--override-generation-config",), _VLLM, "instead",
          "defaults of requests are in generation_config.json in the model's folder", quiet=({}, "{}")),
    Habit(("--default-chat-template-kwargs",), _VLLM, "instead",
          "`chat_template_kwargs` is a field of requests, and an argument of `LLM.chat`", quiet=({}, "{}")),
    Habit(("--convert",), _VLLM, "instead", "{task=embed} or {task=score}", quiet=("auto", "none")),
    Habit(("--num-speculative-tokens", "--speculative-num-draft-tokens", "--speculative-num-steps"), _BOTH,
          "instead", "{speculation_policy=fixed:5} drafts 5 tokens; by default the policy chooses the "
          "number"),
    Habit(("--speculative-algorithm",), ("sglang",), "instead",
          "{draft} gives the drafter: a small model, ngram, or self:4"),
    Habit(("--enable-sleep-mode",), _VLLM, "instead",
          "{idle_unload=10m} unloads a model of a server; `LLM.close` frees its memory", quiet=(False,),
          values="none"),
    Habit(("--ssl-ca-certs", "--ssl-cert-reqs"), _VLLM, "instead",
          "clients have keys, not certificates: {api_key_file}"),
    Habit(("--root-path",), _VLLM, "instead", "a proxy that removes the prefix of the path"),
)  # fmt: skip

_TEXT_ONLY = "only text is served"
_ONE_DEVICE = "a model is on the CPU or on the GPU as a whole"

IDLE = (
    Habit(("--trust-remote-code",), _BOTH, "idle",
          "no code of a checkpoint is ever run; what is not implemented is refused", quiet=(False,),
          values="none"),
    Habit(("--enforce-eager", "--disable-cuda-graph"), _BOTH, "idle",
          "the output does not depend on CUDA graphs", quiet=(False,), values="none"),
    Habit(("--compilation-config", "--max-seq-len-to-capture", "--cuda-graph-sizes"), _VLLM, "idle",
          "the output does not depend on compilation"),
    Habit(("--enable-torch-compile",), ("sglang",), "idle", "the output does not depend on compilation",
          quiet=(False,), values="none"),
    Habit(("--attention-backend", "--sampling-backend"), _BOTH, "idle",
          "there is one implementation for each device: {backend}"),
    Habit(("--guided-decoding-backend", "--grammar-backend"), _BOTH, "idle",
          "llguidance enforces all grammars"),
    Habit(("--enable-chunked-prefill", "--enable-mixed-chunk"), _BOTH, "idle",
          "prompts are always computed in chunks: {max_chunk}", values="none"),
    Habit(("--async-scheduling",), _VLLM, "idle", "the output does not depend on it", values="none"),
    Habit(("--scheduling-policy",), _VLLM, "idle", "the `priority` of requests is always obeyed",
          quiet=("priority",)),
    Habit(("--disable-custom-all-reduce",), _BOTH, "idle", "the output does not depend on it",
          quiet=(False,), values="none"),
    Habit(("--enable-auto-tool-choice",), _VLLM, "idle", "tools are always enabled", quiet=(False,),
          values="none"),
    Habit(("--disable-log-stats", "--disable-log-requests", "--enable-log-requests"), _VLLM, "idle",
          "/metrics has the counts; {access_log} logs requests", quiet=(False,), values="none"),
    Habit(("--enable-metrics", "--metrics"), ("sglang", "llama.cpp"), "idle",
          "/metrics is always there", quiet=(False,), values="none"),
    Habit(("--disable-uvicorn-access-log",), _VLLM, "idle",
          "requests are not logged, unless by {access_log}", quiet=(False,), values="none"),
    Habit(("--enable-prompt-tokens-details",), _VLLM, "idle", "the usage always has these counts",
          quiet=(False,), values="none"),
    Habit(("--enable-request-id-headers",), _VLLM, "idle", "replies always have the header",
          quiet=(False,), values="none"),
    Habit(("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path",
           "--mm-processor-cache-gb"), _VLLM, "idle", _TEXT_ONLY),
    Habit(("--language-model-only", "--skip-mm-profiling"), _VLLM, "idle", _TEXT_ONLY, quiet=(False,),
          values="none"),
    Habit(("--model-impl", "--code-revision"), _VLLM, "idle", "no code of a checkpoint is ever run"),
    Habit(("--max-log-len",), _VLLM, "idle", "prompts are not logged"),
    Habit(("--stream-interval",), ("sglang",), "idle", "each step of the engine is an event"),
)  # fmt: skip

REFUSED = (
    Habit(("--pipeline-parallel-size", "-pp", "--pp-size"), _BOTH, "refused",
          "layers are not divided among GPUs: {tensor_parallel_size} divides every layer", quiet=(1, "1")),
    Habit(("--cpu-offload-gb", "--offload-group-size"), _BOTH, "refused",
          f"{_ONE_DEVICE}: {{device=cpu}}, or {{quantization=int4}} for a smaller one",
          quiet=(0, 0.0, "0")),
    Habit(("--enable-expert-parallel",), _VLLM, "refused",
          "experts are divided as other matrices: {tensor_parallel_size}", quiet=(False,), values="none"),
    Habit(("--load-format",), _BOTH, "refused", "weights are read from safetensors or GGUF files: give the "
          "folder or the file", quiet=("auto", "safetensors")),
    Habit(("--tokenizer-mode",), _BOTH, "refused", "the tokenizer is read from the model's files: leave this "
          "out", quiet=("auto",)),
    Habit(("--skip-tokenizer-init",), _BOTH, "refused",
          "prompts may be token ids, and outputs have them, but the tokenizer is always loaded: leave this "
          "out", quiet=(False,), values="none"),
    Habit(("--rope-scaling", "--rope-theta"), _VLLM, "refused",
          "positions are as in config.json: change it in a copy of the model's folder", quiet=({}, "{}")),
    Habit(("--disable-sliding-window",), _VLLM, "refused",
          "attention is as in config.json: change it in a copy of the model's folder", quiet=(False,),
          values="none"),
    Habit(("--logits-processors",), _VLLM, "refused",
          "workers run no code of others: requests have `logit_bias`, `allowed_token_ids` and grammars"),
    Habit(("--middleware",), _VLLM, "refused", "the server runs no code of others: use a proxy"),
    Habit(("--uds",), _VLLM, "refused", "the server listens on TCP: {host} and {port}"),
    Habit(("--response-role",), _VLLM, "refused", "replies have the role assistant: leave this out",
          quiet=("assistant",)),
)  # fmt: skip
