"""Request schemas for the OpenAPI document. The parsers are the authority; tests feed them each bound of a field, and compare the fields with
docs/api.md."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _number(low: float, high: float | None = None) -> Schema:
    return {"type": ["number", "null"], "minimum": low, **({"maximum": high} if high is not None else {})}


def _positive(high: float | None = None) -> Schema:
    return {"type": ["number", "null"], "exclusiveMinimum": 0.0, **({"maximum": high} if high is not None else {})}


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, **({"maximum": high} if high is not None else {})}


_BOOL: Schema = {"type": ["boolean", "null"]}
_STRING: Schema = {"type": ["string", "null"]}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STOP: Schema = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "maxItems": 32, "items": {"type": "string", "minLength": 1}}]}
_PROMPT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, _IDS, {"type": "array", "items": _IDS}],
}
SAMPLING: Schema = {
    "temperature": _number(0.0, 2.0),
    "top_p": _positive(1.0),
    "top_k": _integer(-1),
    "min_p": _number(0.0, 1.0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _positive(10.0),
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "allowed_token_ids": _IDS,
    "stop": _STOP,
    "stop_token_ids": _IDS,
    "ignore_eos": _BOOL,
    "min_tokens": _integer(0),
    "min_new_tokens": _integer(0),
    "include_stop_str_in_output": _BOOL,
    "no_stop_trim": _BOOL,
    "skip_special_tokens": _BOOL,
    "seed": {"type": ["integer", "null"]},
    "sampling_seed": {"type": ["integer", "null"]},
    "n": _integer(1),
    "best_of": _integer(1),
}
COMMON: Schema = {
    "model": _STRING,
    "stream": _BOOL,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _BOOL, "continuous_usage_stats": _BOOL}},
    "priority": _integer(-(2**31), 2**31 - 1),
    "cache_salt": _STRING,
    "extra_key": _STRING,
    "deadline_s": _positive(),
    "user": _STRING,
    "routing_key": _STRING,
    "return_token_ids": _BOOL,
    "prompt_logprobs": _integer(0),
    "rid": _STRING,
    "request_id": _STRING,
    "sse_ping_interval": _number(0.0, 3600.0),
    "add_special_tokens": _BOOL,
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]}, "content": {}},
}
CHAT: Schema = {
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "max_completion_tokens": _integer(1),
    "max_tokens": _integer(1),
    "logprobs": _BOOL,
    "top_logprobs": _integer(0),
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "functions": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": {"enum": ["auto", "none", None]},
    "response_format": {"type": ["object", "null"], "properties": {"type": {"enum": ["text"]}}},
    "add_generation_prompt": _BOOL,
    "continue_final_message": _BOOL,
    "chat_template_kwargs": {"type": ["object", "null"]},
    "reasoning_effort": _STRING,
    "service_tier": _STRING,
}
COMPLETION: Schema = {
    "prompt": _PROMPT,
    "max_tokens": _integer(0),
    "echo": _BOOL,
    "logprobs": _integer(0),
    "return_tokens_as_token_ids": _BOOL,
}
_NATIVE_SAMPLING: Schema = {
    "type": "object",
    "properties": {**SAMPLING, "temperature": _number(0.0), "max_new_tokens": _integer(0), "max_tokens": _integer(0)},
}
NATIVE: Schema = {
    "text": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "input_ids": {"anyOf": [_IDS, {"type": "array", "items": _IDS}]},
    "sampling_params": {"anyOf": [_NATIVE_SAMPLING, {"type": "array", "items": _NATIVE_SAMPLING}]},
    "stream": _BOOL,
    "incremental": _BOOL,
    "return_logprob": {},
    "logprob_start_len": {},
    "top_logprobs_num": {},
    "return_text_in_logprobs": _BOOL,
    "rid": {},
    "extra_key": {},
    "cache_salt": {},
    **{name: COMMON[name] for name in ("model", "priority", "deadline_s", "user", "routing_key", "sse_ping_interval", "add_special_tokens")},
}


def _body(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


ROUTE_DOCS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"summary": "Chat completion", "extra": _body({**CHAT, **SAMPLING, **COMMON}, ("messages",))},
    "/v1/completions": {"summary": "Text completion", "extra": _body({**COMPLETION, **SAMPLING, **COMMON}, ("prompt",))},
    "/v1/models": {"summary": "Served models"},
    "/v1/models/{model_id:path}": {"summary": "One served model"},
    "/generate": {"summary": "Native generation", "extra": _body(NATIVE)},
    "/tokenize": {"summary": "Text or messages to token ids", "extra": _body({"prompt": {}, "text": {}, "messages": {}, "content": {}})},
    "/detokenize": {"summary": "Token ids to text", "extra": _body({"tokens": {"type": "array"}}, ("tokens",))},
    "/health": {"summary": "Liveness"},
    "/ready": {"summary": "Readiness, with progress while loading"},
    "/health_generate": {"summary": "Deep probe: one token when idle"},
    "/metrics": {"summary": "Prometheus metrics"},
    "/server_info": {"summary": "Configuration, capacity, counters"},
    "/get_server_info": {"summary": "As /server_info"},
    "/model_info": {"summary": "The served model"},
    "/get_model_info": {"summary": "As /model_info"},
    "/flush_cache": {"summary": "Forget all cached prefixes"},
    "/abort_request": {"summary": "End one request or all", "extra": _body({"rid": _STRING, "abort_all": _BOOL})},
    "/pause_generation": {"summary": "Launch nothing more", "extra": _body({"mode": {"enum": ["abort", "retract", "in_place", None]}})},
    "/continue_generation": {"summary": "Go on after a pause"},
    "/cache/tree": {"summary": "The radix tree as text"},
    "/cache/stats": {"summary": "Sizes and counters of the prefix cache, and its pins"},
    "/cache/pin": {
        "summary": "Keep a cached prefix for a while",
        "extra": _body(
            {
                "text": _STRING,
                "input_ids": _IDS,
                "ttl_s": _positive(86400.0),
                "add_special_tokens": _BOOL,
                "extra_key": _STRING,
                "cache_salt": _STRING,
            }
        ),
    },
    "/cache/unpin": {"summary": "Give up one pin or all", "extra": _body({"pin_id": _STRING, "all": _BOOL})},
    "/debug/state": {"summary": "Queues, lengths, ledger, tree"},
    "/debug/requests/{rid:path}": {"summary": "One request, what happened to it and why it waited"},
    "/": {"summary": "What this server is"},
}
