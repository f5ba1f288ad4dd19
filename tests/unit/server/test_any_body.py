"""Whatever JSON a client sends, the answer is 200 or a clear error of the one envelope: never a 500."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.fake_manager import FakeManager, config
from rootlet.server.app import build_app

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 16, 257, 258, 2**31, 2**63, 1.5, -0.5, 1e300, "", "x", "auto", "é\x00", [], [1], ["x"], [[]], [[1]],
    [None], {}, {"a": 1},
    {"type": "text"}, {"type": "json_object"}, {"1": 5}, {"role": "user", "content": "x"}, [{"role": "user", "content": "x"}], [{"type": "function"}],
]  # fmt: skip
FIELDS = {
    "/v1/chat/completions": [
        "messages", "tools", "tool_choice", "functions", "function_call", "response_format", "top_logprobs", "chat_template_kwargs",
        "reasoning_effort",
        "continue_final_message", "add_generation_prompt", "modalities", "service_tier", "chat_template", "parallel_tool_calls",
    ],
    "/v1/completions": ["prompt", "echo", "suffix", "return_tokens_as_token_ids", "add_special_tokens"],
    "/generate": ["text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "incremental", "session_params"],
    "/tokenize": ["prompt", "text", "messages", "content", "with_pieces", "add_special", "return_token_strs"],
    "/detokenize": ["tokens", "skip_special_tokens"],
    "/abort_request": ["rid", "abort_all"],
}  # fmt: skip
SHARED = [
    "model", "stream", "stream_options", "n", "best_of", "seed", "stop", "stop_token_ids", "logit_bias", "temperature", "top_p", "top_k",
    "min_p", "logprobs",
    "max_tokens", "max_completion_tokens", "min_tokens", "presence_penalty", "repetition_penalty", "allowed_token_ids", "ignore_eos",
    "rid", "priority",
    "cache_salt", "deadline_s", "user", "prompt_logprobs", "return_token_ids", "sse_ping_interval", "lora_path", "guided_json", "structured_outputs",
]  # fmt: skip
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}, "/v1/completions": {"prompt": "x"}, "/generate": {"text": "x"},
}  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(list(FIELDS)))
    names = draw(st.lists(st.sampled_from(FIELDS[path] + SHARED), min_size=1, max_size=3, unique=True))
    json = st.recursive(
        st.sampled_from(ODD), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=4
    )
    return path, {**BASE.get(path, {}), **{name: draw(json) for name in names}}


@settings(max_examples=150, deadline=None)
@given(requests())
def test_no_body_makes_a_500(request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    manager = FakeManager()

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(manager, config()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body)

    response = asyncio.run(go())
    assert response.status_code in (200, 400, 404, 501), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["status"] == response.status_code
        assert error["message"]
        assert manager.requests == []
    assert manager.running == 0
