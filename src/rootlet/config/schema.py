"""All knobs, once: frozen dataclasses whose field metadata (help, unit, range, choices) is the source of flags, environment names, file keys,
`--print-config` and docs. At most 60 fields in all (house rule). "auto" is resolved once, in `config/resolve.py`, with the reason kept.

A flag is `--field-name`, the environment name `ROOTLET_FIELD_NAME`, the file key `field_name` in a TOML table named after the section.
Precedence: flag > environment > file > default. A room receives the section it needs, never the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def knob(
    default: Any, text: str, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] | None = None, unit: str = ""
) -> Any:
    """A documented dataclass field. `low`/`high` inclusive; `choices` closed set."""
    return field(default=default, metadata={"help": text, "low": low, "high": high, "choices": choices, "unit": unit})


@dataclass(frozen=True, slots=True)
class ModelArgs:
    model: str | None = knob(None, "GGUF file, folder of safetensors, or Hub id; none = the default model (SmolLM2-135M-Instruct, Q4_1)")
    served_model_name: str | None = knob(None, "names that requests may use, comma separated; the first one is reported")
    dtype: str = knob(
        "auto",
        "dtype of the weights; auto = as in the file, anything else converts them all, quantised ones too",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    kv_dtype: str = knob(
        "auto",
        "dtype of the KV cache; auto = float16, or float32 for a float32 model; int8 takes 53 % of float16 at head size 64",
        choices=("auto", "float16", "float32", "int8"),
    )
    ctx_len: int | None = knob(None, "longest prompt + output; none = what the model was trained for", low=8, unit="tokens")
    chat_template: str | None = knob(None, "file with a jinja chat template that replaces the model's own")


@dataclass(frozen=True, slots=True)
class CacheArgs:
    page_size: int = knob(
        16,
        "tokens a KV page, a power of two; native attention takes 16 or more, smaller ones run on the reference",
        low=1,
        high=128,
        unit="tokens",
    )
    mem: str = knob("auto", "memory of the KV pool: auto, or GiB as a number", unit="GiB")
    max_total_tokens: int | None = knob(None, "KV pool size in tokens, a page at least; wins over --mem", low=16, unit="tokens")
    prefix_cache: bool = knob(True, "share KV of equal prefixes between requests")
    evict: str = knob("lru", "which cached prefix goes first", choices=("lru", "lfu", "fifo", "mru", "filo", "priority", "slru"))
    kv_events: str | None = knob(
        None, "ZeroMQ endpoint where routers can hear which blocks are cached, as tcp://127.0.0.1:5557; it tells the prompts' token ids; none = off"
    )
    kv_events_replay: str | None = knob(None, "ZeroMQ endpoint where the last batches of --kv-events can be had again; none = off")
    kv_events_topic: str = knob("", "topic that every batch of --kv-events carries")


@dataclass(frozen=True, slots=True)
class SchedulerArgs:
    schedule_policy: str = knob(
        "fcfs",
        "order of the waiting queue, within equal priority; vtc is fair between tenants (API keys, else `user`)",
        choices=("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "lof", "random", "routing-key", "vtc"),
    )
    aging: int = knob(
        64, "tokens that each pass of waiting counts for under lpm and its kin, so that nobody starves; 0 = never age", low=0, unit="tokens"
    )
    preempt_gap: int = knob(
        10, "under fcfs and lof, a request takes the place of running ones whose priority is lower by more than this; -1 = never", low=-1
    )
    min_free_slots: int = knob(0, "while requests run, admit new ones only when so many rows are free; 0 = always", low=0)
    decode_interval: int = knob(0, "decode steps between two prefill steps while requests decode; 0 = prefill whenever possible", low=0)
    max_running: int = knob(64, "requests that hold KV at once", low=1, high=4096)
    max_queue: int = knob(1024, "requests that wait beside those that have a row (--max-running); more get 503 with Retry-After", low=1)
    chunked_prefill: int = knob(512, "tokens of one prefill chunk; 0 = whole prompts", low=0, unit="tokens")
    max_prefill: int = knob(8192, "tokens of one prefill step", low=1, unit="tokens")
    depth: str = knob("auto", "steps in flight: 1 = event_loop_normal, 2 = event_loop_overlap", choices=("auto", "1", "2"))
    mixed_chunk: bool = knob(False, "run decode rows together with a prefill chunk")
    conservativeness: float = knob(1.0, "scales the output that is reserved for running requests at admission", low=0.0, high=10.0)
    queue_timeout: float | None = knob(None, "seconds a request may wait before 504", low=0.0, unit="s")
    request_timeout: float | None = knob(None, "seconds a request may take before 504", low=0.0, unit="s")
    record: str | None = knob(None, "file that gets every message, result and plan, for `rootlet replay`; holds prompts, grows with the traffic")


@dataclass(frozen=True, slots=True)
class ComputeArgs:
    device: str = knob("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    threads: int | None = knob(None, "kernel threads; none = one a core", low=1, high=256)
    kernels: str = knob("auto", "native C++ kernels, or the torch reference", choices=("auto", "native", "reference"))
    graph: bool = knob(True, "record a step once and replay it (the CPU graph)")


@dataclass(frozen=True, slots=True)
class ServerArgs:
    host: str = knob("127.0.0.1", "address to listen on")
    port: int = knob(30000, "port to listen on; 0 = any free one", low=0, high=65535)
    api_key: str | None = knob(None, "key that every route but liveness asks for; several, comma separated, tell tenants apart under vtc")
    max_n: int = knob(128, "largest n of one request", low=1)
    max_logprobs: int = knob(20, "largest top_logprobs", low=0)
    max_body_mib: int = knob(64, "largest request body", low=1, unit="MiB")
    drain_timeout: float = knob(30.0, "seconds that SIGTERM waits for running requests", low=0.0, unit="s")
    keep_alive: int = knob(75, "seconds an idle connection is kept, or one whose request does not go on", low=1, unit="s")
    sse_keepalive: float = knob(15.0, "seconds of silence after which a stream gets a comment; 0 = never", low=0.0, unit="s")
    stall_timeout: float = knob(120.0, "seconds after which a stream is dropped whose client reads nothing of it; 0 = never", low=0.0, unit="s")
    sampling_defaults: str = knob("model", "where absent sampling parameters come from", choices=("model", "openai"))
    log_level: str = knob("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_requests: bool = knob(True, "a line for each finished request")
    detokenizer: str = knob(
        "auto", "where text is made: inside the HTTP process, or its own; auto = own with more than two cores", choices=("auto", "inline", "process")
    )


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    model: ModelArgs = field(default_factory=ModelArgs)
    cache: CacheArgs = field(default_factory=CacheArgs)
    scheduler: SchedulerArgs = field(default_factory=SchedulerArgs)
    compute: ComputeArgs = field(default_factory=ComputeArgs)
    server: ServerArgs = field(default_factory=ServerArgs)
