"""The official openai client against the app: its parsers and stream accumulators are the judge."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import openai
import pytest

from fixtures.fake_manager import FakeManager, Script, config
from rootlet.core.types import Finish, FinishKind
from rootlet.server.app import build_app

# The client speaks through whichever HTTP library it was built on.
http = importlib.import_module("httpx2" if int(openai.__version__.split(".")[0]) >= 3 else "httpx")
USER: Any = [{"role": "user", "content": "hi"}]


def client_of(*scripts: Script, **server: Any) -> openai.AsyncOpenAI:
    app = build_app(FakeManager(scripts or (Script(),)), config(**server))
    transport = http.ASGITransport(app=app, raise_app_exceptions=False)
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http.AsyncClient(transport=transport), max_retries=0)


def run(work: Any) -> None:
    asyncio.run(work())


def test_replies_parse() -> None:
    async def go() -> None:
        client = client_of()
        chat = await client.chat.completions.create(model="tiny", messages=USER, n=2, logprobs=True, top_logprobs=3, seed=4)
        assert [c.message.content for c in chat.choices] == ["Hello", "Hello"]
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 4
        assert chat.choices[0].logprobs is not None
        completion = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=2, echo=True)
        assert [c.text for c in completion.choices] == ["aHello", "bHello"]
        assert [m.id async for m in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"

    run(go)


def test_row_06_the_stream_accumulator_gets_what_it_needs() -> None:
    async def go() -> None:
        client = client_of(Script(("a", "é", "b")), Script(("x",), finish=Finish(FinishKind.STOP, "END")), Script(("q", "r")))
        options: Any = {"include_usage": True}
        async with client.chat.completions.stream(model="tiny", messages=USER, n=3, stream_options=options, logprobs=True, top_logprobs=1) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert [(c.message.content, c.finish_reason) for c in final.choices] == [("aéb", "stop"), ("x", "stop"), ("qr", "stop")]
        assert final.usage is not None
        assert final.usage.completion_tokens == 5 + 1 + 3
        assert final.choices[0].logprobs is not None
        assert "".join(e.token for e in final.choices[0].logprobs.content or []) == "aéb"

    run(go)


def test_plain_streams_end_without_an_exception() -> None:
    async def go() -> None:
        client = client_of()
        chunks = [c async for c in await client.chat.completions.create(model="tiny", messages=USER, stream=True)]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello"
        texts = [c.choices[0].text async for c in await client.completions.create(model="tiny", prompt="x", stream=True)]
        assert "".join(texts) == "Hello"

    run(go)


def test_errors_become_the_clients_exceptions() -> None:
    async def go() -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client_of().chat.completions.create(model="tiny", messages=USER, temperature=3)
        assert caught.value.param == "temperature"
        assert caught.value.code == "invalid_value"
        with pytest.raises(openai.BadRequestError):
            await client_of().completions.create(model="tiny", prompt=[1] * 999, stream=True)
        with pytest.raises(openai.AuthenticationError):
            await client_of(api_key="other").chat.completions.create(model="tiny", messages=USER)
        assert (await client_of(api_key="k").chat.completions.create(model="tiny", messages=USER)).choices
        with pytest.raises(openai.NotFoundError):
            await client_of().models.retrieve("none")
        broken = client_of(Script(("a",), finish=Finish(FinishKind.ERROR, status=500, message="nan")))
        stream = await broken.chat.completions.create(model="tiny", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="nan"):
            async for _ in stream:
                pass

    run(go)
