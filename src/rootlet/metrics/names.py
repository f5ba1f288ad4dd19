"""Every metric of this server, once: name, kind, help, labels, buckets. `docs/metrics.md` lists the same names; a test compares the two.

Names are a promise to dashboards: they are added to, never renamed. Labels are closed sets (no user, no path of a client's making).
"""

from __future__ import annotations

from dataclasses import dataclass

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Metric:
    """`kind` is counter, gauge or histogram. A counter's exported name ends in `_total`; `name` is the exported one."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REQUESTS = Metric("rootlet_requests_total", "counter", "Choices that ended, by outcome: stop, length, abort, error, refused", ("outcome",))
PROMPT_TOKENS = Metric("rootlet_prompt_tokens_total", "counter", "Prompt tokens of finished requests (once for all n choices)")
CACHED_TOKENS = Metric("rootlet_cached_tokens_total", "counter", "Prompt tokens found in the prefix cache, by tier", ("tier",))
GENERATED_TOKENS = Metric("rootlet_generated_tokens_total", "counter", "Tokens drawn, the stop token included")
RETRACTIONS = Metric("rootlet_request_retractions_total", "counter", "Times that finished requests were retracted")
TTFT = Metric("rootlet_time_to_first_token_seconds", "histogram", "From the request's start to its first token", (), TTFT_BUCKETS)
ITL = Metric("rootlet_inter_token_latency_seconds", "histogram", "Between two tokens of one choice", (), ITL_BUCKETS)
TPOT = Metric("rootlet_time_per_output_token_seconds", "histogram", "Mean time of a token after the first, one value a choice", (), ITL_BUCKETS)
E2E = Metric("rootlet_e2e_latency_seconds", "histogram", "From a request's start to the end of a choice", (), E2E_BUCKETS)
QUEUE = Metric("rootlet_queue_seconds", "histogram", "Time in the waiting queue", (), TTFT_BUCKETS)
PROMPT_LEN = Metric("rootlet_request_prompt_tokens", "histogram", "Prompt length of a request", (), TOKEN_BUCKETS)
COMPLETION_LEN = Metric("rootlet_request_generated_tokens", "histogram", "Generated length of a choice", (), TOKEN_BUCKETS)
IN_FLIGHT = Metric("rootlet_requests_in_flight", "gauge", "Requests that the HTTP process has open")
HTTP = Metric("rootlet_http_requests_total", "counter", "HTTP requests by route template, method and status", ("route", "method", "status"))
HTTP_SECONDS = Metric("rootlet_http_first_byte_seconds", "histogram", "From a request's arrival to its response headers", ("route",), TTFT_BUCKETS)

RUNNING = Metric("rootlet_running_requests", "gauge", "Requests that hold KV, as the scheduler counts them")
WAITING = Metric("rootlet_waiting_requests", "gauge", "Requests in the scheduler's queue")
KV_PAGES = Metric(
    "rootlet_kv_pages",
    "gauge",
    "KV pages by state: free, cached (evictable), locked (shared, in use), private (of one running request), leaked (of nobody), total",
    ("state",),
)
SCHEDULER_RETRACTIONS = Metric("rootlet_retractions_total", "counter", "Retractions by the scheduler since its start")
SCHEDULER_PREEMPTIONS = Metric("rootlet_preemptions_total", "counter", "Requests that gave way to a more important one, since the engine's start")
LOOKUP_TOKENS = Metric("rootlet_cache_lookup_tokens_total", "counter", "Tokens looked up in the cache, at each attempt to admit a request")
HIT_TOKENS = Metric(
    "rootlet_cache_hit_tokens_total",
    "counter",
    "Of those, found: all, and what each component of the cache would have found alone",
    ("tier", "component"),
)
EVICTIONS = Metric(
    "rootlet_evictions_total", "counter", "Pages or state slots given up, by tier, component and reason", ("tier", "component", "reason")
)
CACHE_UNITS = Metric(
    "rootlet_cache_units",
    "gauge",
    "Pages and state slots beside the full attention's of the device: of its other components, and of all on the host tier; held = of a prefix",
    ("tier", "component", "state"),
)
HOST_PAGES = Metric("rootlet_host_pages_total", "counter", "KV pages backed up to the host, loaded back, or demoted (left to their copy)", ("event",))
HOST_COPIES = Metric("rootlet_host_copies_in_flight", "gauge", "Copies between device and host that are under way")
HOST_COPIES_LOST = Metric(
    "rootlet_host_copies_lost_total", "counter", "Copies that failed, or were not begun for want of room on the host or the device", ("reason",)
)
KV_EVENT_BATCHES = Metric("rootlet_kv_event_batches_total", "counter", "Batches of KV events that were published")
KV_EVENT_DROPS = Metric("rootlet_kv_event_batches_dropped_total", "counter", "Batches of KV events that came faster than they could be sent")
EVICTED_PAGES = Metric("rootlet_evicted_pages_total", "counter", "Cached KV pages that were given up for new ones, since the engine's start")
QUEUE_BY_REASON = Metric(
    "rootlet_queued_requests", "gauge", "Waiting requests by what holds the head of the queue back: a budget, a delay, a gate", ("reason",)
)
SCHEDULER_STATE = Metric("rootlet_scheduler_state", "gauge", "Any other number of the scheduler's snapshot, by key", ("key",))
ENGINE_UP = Metric("rootlet_engine_up", "gauge", "1 when the engine is ready and makes progress")

REQUEST_METRICS = (
    REQUESTS, PROMPT_TOKENS, CACHED_TOKENS, GENERATED_TOKENS, RETRACTIONS, TTFT, ITL, TPOT, E2E, QUEUE, PROMPT_LEN, COMPLETION_LEN, IN_FLIGHT,
    HTTP, HTTP_SECONDS,
)  # fmt: skip
ENGINE_METRICS = (
    RUNNING,
    WAITING,
    KV_PAGES,
    SCHEDULER_RETRACTIONS,
    SCHEDULER_PREEMPTIONS,
    LOOKUP_TOKENS,
    HIT_TOKENS,
    EVICTED_PAGES,
    EVICTIONS,
    CACHE_UNITS,
    HOST_PAGES,
    HOST_COPIES,
    HOST_COPIES_LOST,
    KV_EVENT_BATCHES,
    KV_EVENT_DROPS,
    QUEUE_BY_REASON,
    SCHEDULER_STATE,
    ENGINE_UP,
)
ALL = REQUEST_METRICS + ENGINE_METRICS
