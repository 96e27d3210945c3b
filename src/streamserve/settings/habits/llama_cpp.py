"""Habits of llama.cpp's server and command line."""

from streamserve.settings.habits import convert
from streamserve.settings.habits.convert import fixed, to, unless_automatic
from streamserve.settings.habits.habit import Habit, Program

_LLAMA: tuple[Program, ...] = ("llama.cpp",)
_OLLAMA: tuple[Program, ...] = ("ollama",)

_SAMPLING = (
    "a field of requests; defaults are in generation_config.json in the model's folder; `streamserve "
    "generate` and `chat` have `--temperature`, `--top-p`, `--seed` and `--max-tokens`"
)
_ONE_DEVICE = "a model is on the CPU or on the GPU as a whole: {device}"
_KV = {"q8_0": "int8", "f16": "auto", "bf16": "auto"}
_ROPE = "positions are as in the file: give a model with a longer context"
_FORMS = "a field of requests: `response_format`, `guided_grammar` or `structured_outputs`"

TAKEN = (
    Habit(("--hf-repo", "-hf", "-hfr"), _LLAMA, "taken", "MODEL: owner/model:Q4_K_M", to("model")),
    Habit(("--alias", "-a"), _LLAMA, "taken", "{served_model_name}", convert.to_list("served_model_name")),
    Habit(("--ctx-size", "-c"), _LLAMA, "taken",
          "{max_model_len}, for each sequence: it is not divided among slots", convert.length),
    Habit(("--parallel", "-np"), _LLAMA, "taken", "{max_num_seqs}", unless_automatic("max_num_seqs")),
    Habit(("-t",), _LLAMA, "taken", "{threads}", unless_automatic("threads")),
    Habit(("--batch-size", "-b"), _LLAMA, "taken", "{max_num_batched_tokens}", to("max_num_batched_tokens")),
    Habit(("--n-gpu-layers", "--gpu-layers", "-ngl"), _LLAMA, "taken",
          "{device=cpu} for 0; with other numbers the whole model is on the GPU if there is one",
          convert.gpu_layers),
    Habit(("--cache-type-k", "-ctk"), _LLAMA, "taken",
          "{kv_cache_dtype=int8} for q8_0; f16 and bf16 are the model's data type",
          convert.one_of("kv_cache_dtype", _KV, "keys have the model's data type, or 8 bits: "
                         "{kv_cache_dtype=int8}")),
    Habit(("--cache-type-v", "-ctv"), _LLAMA, "taken",
          "{kv_cache_dtype=int8} for q8_0; f16 and bf16 are the model's data type",
          convert.one_of("kv_cache_dtype", _KV, "values have the model's data type, or 8 bits: "
                         "{kv_cache_dtype=int8}")),
    Habit(("--model-draft", "-md", "-hfd"), _LLAMA, "taken", "{draft}", to("draft")),
    Habit(("--draft",), _LLAMA, "taken",
          "{draft} is the drafter; a number of draft tokens is {speculation_policy=fixed:16}",
          convert.drafter),
    Habit(("--embedding", "--embeddings"), _LLAMA, "taken", "{task=embed}", fixed({"task": "embed"}),
          values="none"),
    Habit(("--reranking", "--rerank"), _LLAMA, "taken", "{task=score}", fixed({"task": "score"}),
          values="none"),
    Habit(("--chat-template-file",), _LLAMA, "taken", "{chat_template}", to("chat_template")),
    Habit(("--ssl-cert-file",), _LLAMA, "taken", "{ssl_certfile}", to("ssl_certfile")),
    Habit(("--ssl-key-file",), _LLAMA, "taken", "{ssl_keyfile}", to("ssl_keyfile")),
    Habit(("--verbose", "-v"), _LLAMA, "taken", "{log_level=debug}", fixed({"log_level": "debug"}),
          values="none"),
)  # fmt: skip

INSTEAD = (
    Habit(("--hf-file", "-hff"), _LLAMA, "instead", "a quantization is a part of the model's name: "
          "owner/model:Q4_K_M"),
    Habit(("--model-url", "-mu"), _LLAMA, "instead", "MODEL: a name on the hub, or a file"),
    Habit(("--threads-batch", "-tb"), _LLAMA, "instead", "{threads} are used for prompts and outputs"),
    Habit(("--ubatch-size", "-ub"), _LLAMA, "instead",
          "{max_chunk} limits the tokens of a prompt in a step, {max_num_batched_tokens} those of all "
          "requests"),
    Habit(("--n-predict", "--predict", "-n", "--temp", "--top-k", "--repeat-penalty",
           "--presence-penalty", "--frequency-penalty", "--min-p"), _LLAMA, "instead", _SAMPLING),
    Habit(("--grammar", "--grammar-file", "--json-schema", "-j"), _LLAMA, "instead", _FORMS),
    Habit(("--draft-max", "--draft-n", "--draft-min", "--draft-p-min"), _LLAMA, "instead",
          "{speculation_policy=fixed:16} drafts 16 tokens; by default the policy chooses the number"),
    Habit(("--lora-scaled",), _LLAMA, "instead", "{lora=NAME=PATH}: the scale is in the adapter's folder"),
    Habit(("--main-gpu", "-mg"), _LLAMA, "instead", "{device=cuda:0}"),
    Habit(("--split-mode", "-sm", "--tensor-split", "-ts"), _LLAMA, "instead",
          "{tensor_parallel_size} divides every layer evenly"),
    Habit(("--timeout", "-to"), _LLAMA, "instead",
          "{read_timeout}, {write_timeout} and {request_timeout}"),
    Habit(("--reasoning-format", "--reasoning-budget"), _LLAMA, "instead",
          "{reasoning_parser}, detected by default; `reasoning_effort` is a field of requests",
          quiet=("auto", "deepseek", "-1", -1)),
    Habit(("--chat-template-kwargs",), _LLAMA, "instead",
          "`chat_template_kwargs` is a field of requests, and an argument of `LLM.chat`"),
    Habit(("--slot-save-path",), _LLAMA, "instead", "prefixes are kept in memory: {kv_cache_bytes}"),
    Habit(("--system-prompt", "-sys"), _LLAMA, "instead",
          "a system message in the request; `streamserve chat` has `--system`"),
)  # fmt: skip

_SAME_OUTPUT = "the output does not depend on it"

IDLE = (
    Habit(("--jinja",), _LLAMA, "idle", "the model's chat template is always rendered", refused=(False,),
          values="none"),
    Habit(("--flash-attn", "-fa"), _LLAMA, "idle", "there is one implementation of attention for each device",
          values="optional"),
    Habit(("--cont-batching", "-cb"), _LLAMA, "idle", "requests are always batched in every step",
          values="none"),
    Habit(("--mlock", "--mmap"), _LLAMA, "idle", _SAME_OUTPUT, values="none"),
    Habit(("--warmup",), _LLAMA, "idle", _SAME_OUTPUT, values="none"),
    Habit(("--numa", "--prio", "--threads-http"), _LLAMA, "idle", _SAME_OUTPUT),
    Habit(("--n-gpu-layers-draft", "-ngld"), _LLAMA, "idle", "a draft model is where its target is"),
    Habit(("--ctx-size-draft", "-cd"), _LLAMA, "idle", "a draft model has the context of its target"),
    Habit(("--slots", "--props"), _LLAMA, "idle", "/v1/router and /v1/models are always there",
          quiet=(False,), values="none"),
    Habit(("--webui",), _LLAMA, "idle", "the page at / is always there", refused=(False,), values="none"),
    Habit(("--kv-unified", "-kvu"), _LLAMA, "idle", "all sequences share one KV cache", values="none"),
)  # fmt: skip

REFUSED = (
    Habit(("--context-shift",), _LLAMA, "refused", "prompts that exceed the context are refused, never "
          "shifted: shorten them", quiet=(False,), values="none"),
    Habit(("--rope-scaling-type", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"),
          _LLAMA, "refused", _ROPE),
    Habit(("--mmproj", "-mm"), _LLAMA, "refused", "only text is served: leave this out"),
    Habit(("--override-kv",), _LLAMA, "refused", "the file's entries are read as they are: change the file"),
)  # fmt: skip

OLLAMA = (
    Habit(("num_ctx",), _OLLAMA, "taken", "{max_model_len}; by default the model's whole context",
          convert.length),
    Habit(("num_thread",), _OLLAMA, "taken", "{threads}", unless_automatic("threads")),
    Habit(("num_batch",), _OLLAMA, "taken", "{max_num_batched_tokens}", to("max_num_batched_tokens")),
    Habit(("num_gpu",), _OLLAMA, "taken", "{device=cpu} for 0; with other numbers the whole model is on the "
          "GPU if there is one", convert.gpu_layers),
    Habit(("keep_alive",), _OLLAMA, "taken", "{idle_unload=10m}", to("idle_unload")),
    Habit(("num_predict",), _OLLAMA, "instead", _SAMPLING),
    Habit(("OLLAMA_HOST",), _OLLAMA, "instead", "{host}, {port}; {port=11434} is Ollama's port"),
    Habit(("OLLAMA_MODELS",), _OLLAMA, "instead", "the environment variable `HF_HOME`"),
    Habit(("OLLAMA_KEEP_ALIVE",), _OLLAMA, "instead", "{idle_unload=10m}"),
    Habit(("OLLAMA_NUM_PARALLEL",), _OLLAMA, "instead", "{max_num_seqs}"),
    Habit(("OLLAMA_MAX_QUEUE",), _OLLAMA, "instead", "{max_requests}"),
    Habit(("OLLAMA_MAX_LOADED_MODELS",), _OLLAMA, "instead",
          "{models_memory_bytes}: memory instead of a number"),
    Habit(("OLLAMA_CONTEXT_LENGTH",), _OLLAMA, "instead",
          "{max_model_len}; by default the model's whole context"),
    Habit(("OLLAMA_KV_CACHE_TYPE",), _OLLAMA, "instead", "{kv_cache_dtype=int8} for q8_0"),
    Habit(("OLLAMA_ORIGINS",), _OLLAMA, "instead", "{cors_origin}"),
)  # fmt: skip
"""Settings of Ollama. Names in capitals are environment variables, which this program does not read."""
