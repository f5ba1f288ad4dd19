"""`rootlet chat --url`: what people write as an address, and servers that do not answer as they should."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fixtures.ports import port_of, reserved_port
from rootlet.cli.chat_http import answers_of, chat_route
from rootlet.core.errors import InvalidValue, Unavailable

REPLIES = {
    "html": (502, b"<html>\n<b>Bad Gateway</b></html>"),
    "empty": (404, b""),
    "text": (200, b"hello there\n"),
    "ours": (400, b'{"error": {"message": "too long"}}'),
    "good": (200, b': comment\n\ndata: {"choices": [{"delta": {"content": "Hi"}}]}\n\ndata: {"choices": [{"delta": {}}]}\n\ndata: [DONE]\n\n'),
}


class Odd(BaseHTTPRequestHandler):
    """Answers POST /NAME/v1/chat/completions with REPLIES[NAME]."""

    def do_POST(self) -> None:
        status, body = REPLIES[self.path.split("/")[1]]
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("url", ["h:1", "http://h:1", "http://h:1/", "h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"])
def test_an_address_may_be_short_or_whole(url: str) -> None:
    assert chat_route(url) == "http://h:1/v1/chat/completions"


@pytest.mark.parametrize("url", ["", "http://", "ftp://h", "unix:///x", "30000", "http://30000/v1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match="--url"):
        chat_route(url)


def test_texts_of_a_stream(address: str) -> None:
    assert "".join(answers_of(f"{address}/good", None, {})([])) == "Hi"


@pytest.mark.parametrize(
    ("name", "said"),
    [("html", "answered 502 .*Bad Gateway</b>"), ("empty", "answered 404"), ("text", "did not answer as.*hello there"), ("ours", "^too long$")],
)
def test_other_answers_are_told_as_they_are(address: str, name: str, said: str) -> None:
    with pytest.raises(Unavailable, match=said):
        list(answers_of(f"{address}/{name}", None, {})([]))


def test_nobody_there() -> None:
    with reserved_port() as silent:
        url = f"127.0.0.1:{port_of(silent)}"
        with pytest.raises(Unavailable, match=rf"no answer from http://{re.escape(url)}/v1/.*rootlet serve"):
            list(answers_of(url, None, {})([]))
