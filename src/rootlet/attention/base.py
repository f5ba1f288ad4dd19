"""The door between `RadixAttention` and the kernels: an `AttentionBackend` is planned once a step and then called once a layer.

Owns the registry of backends. A backend owns its `StepTables`; the KV bytes stay the pool's. It writes K/V first and attends afterwards, so a
step's own tokens are read back from the pool like any other (one path for prefix and new tokens).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rootlet.core.registry import Registry
from rootlet.core.step import Capacity, StepPlan
from rootlet.kernels.ops import AttentionMeta
from rootlet.kv.pool import TokenToKVPool


class AttentionLayer(Protocol):
    """What a backend must know of the layer that calls it (`layers.RadixAttention`). `window` counts keys including the query's own (D5)."""

    @property
    def layer_id(self) -> int: ...

    @property
    def scale(self) -> float: ...

    @property
    def window(self) -> int | None: ...


class AttentionBackend(Protocol):
    """One executor's attention. `plan` on the host before the step, `prep` recordable at its start, `attend` recordable in each layer."""

    @property
    def meta(self) -> AttentionMeta: ...

    @property
    def out_cache_loc(self) -> Tensor:
        """int32 [max_step_tokens], static; the first T entries are the step's slots, the rest the sink."""
        ...

    def plan(self, plan: StepPlan) -> None:
        """Fill the static buffers from the plan: page deltas, lengths, slots, work list."""
        ...

    def prep(self) -> None:
        """Device-side preparation that a graph may capture."""
        ...

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H*D], k and v [T, Hkv*D] (k already rotated) -> [T, H*D]; K/V are in the pool afterwards."""
        ...


class BackendFactory(Protocol):
    """`num_kv_heads` of the model; every layer has the same."""

    layout: str
    """KV layout the backend reads."""

    def __call__(self, pool: TokenToKVPool, capacity: Capacity, num_kv_heads: int) -> AttentionBackend: ...


attention_backends: Registry[BackendFactory] = Registry("attention backend")


def find_backend(name: str) -> BackendFactory:
    """The factory called `name` ("cpu", "reference"). Raises `BadConfig` with the known names."""
    import rootlet.attention.cpu
    import rootlet.attention.reference  # noqa: F401 - both register themselves

    return attention_backends.get(name)
