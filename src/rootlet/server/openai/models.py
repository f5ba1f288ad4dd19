"""`GET /v1/models` and `GET /v1/models/{id}`: what this server answers to."""

from __future__ import annotations

from typing import Any

from rootlet.core.errors import NotFound
from rootlet.server.context import ServerContext
from rootlet.server.errors import show


def model_card(context: ServerContext, name: str) -> dict[str, Any]:
    """One entry. `created` is the server's start; facts of the model are there once it is loaded."""
    ready = context.manager.ready_info
    info = ready.info if ready else {}
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "rootlet",
        "root": name,
        "parent": None,
        "max_model_len": ready.max_context_len if ready else None,
        "status": {"value": "loaded" if context.manager.status in ("ready", "draining") else context.manager.status},
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }
    facts = {key: value for key, value in info.items() if isinstance(value, int | float | str | bool)}
    card["meta"] = {"n_vocab": ready.vocab_size, "n_ctx": ready.max_context_len, **facts} if ready else None
    return card


def list_models(context: ServerContext) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(context, name) for name in context.manager.served_names]}


def retrieve_model(context: ServerContext, name: str) -> dict[str, Any]:
    """Raises `NotFound` (404, code model_not_found)."""
    names = context.manager.served_names
    if name not in names:
        raise NotFound(f"the model {show(name)} does not exist; served: {', '.join(names)}", param="model")
    return model_card(context, name)
