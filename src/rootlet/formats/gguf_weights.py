"""A GGUF model (one file or a split) as a `WeightFile`: tensors under their Hugging Face names.

Owns the table of names. Rows of q/k stay as the file has them: where the converter interleaved them, `RopeConfig.interleaved` says so
and the rope runs on pairs. Does not know which tensors a model needs (`formats.weights.check_tensors`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rootlet.core.errors import BadModelFile
from rootlet.formats.gguf import GGUFFile
from rootlet.formats.gguf_split import open_pieces
from rootlet.formats.tensor import RawTensor, dequantize

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"^blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")
_SIDE_TENSORS = {"rope_freqs.weight"}
ROPE_FREQS = "rope_freqs.weight"


def hf_name(name: str) -> str | None:
    """The Hugging Face name of the GGUF tensor `name`; None if this table has no place for it."""
    match = _LAYER_NAME.match(name)
    if match is not None:
        part = _LAYER.get(match[2])
        return None if part is None else f"model.layers.{match[1]}.{part}.{match[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_TOP[stem]}.{suffix}" if stem in _TOP and suffix in ("weight", "bias") else None


class GGUFWeights:
    """All pieces of one GGUF model. `metadata` is the first piece's."""

    def __init__(self, path: Path) -> None:
        """Open the model that `path` means. `unknown` = tensors without a place. Raises: BadModelFile."""
        self._files = open_pieces(path)
        self._where: dict[str, tuple[GGUFFile, str]] = {}
        self._side: dict[str, GGUFFile] = {}
        self.label = self._files[0].path.name
        unknown: list[str] = []
        for file in self._files:
            for name in file.tensors:
                mapped = hf_name(name)
                if mapped is not None:
                    self._where[mapped] = (file, name)
                elif name in _SIDE_TENSORS:
                    self._side[name] = file
                else:
                    unknown.append(name)
        self.unknown: tuple[str, ...] = tuple(unknown)

    @property
    def metadata(self) -> GGUFFile:
        """The file that carries the model's metadata."""
        return self._files[0]

    def names(self) -> list[str]:
        """Hugging Face names of all tensors that have one."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of `name`, rows first. Raises: BadModelFile."""
        file, gguf_name = self._find(name)
        return file.tensors[gguf_name].shape

    def kind(self, name: str) -> str:
        """The type of `name`. Raises: BadModelFile."""
        file, gguf_name = self._find(name)
        return file.tensors[gguf_name].kind

    def get(self, name: str) -> RawTensor:
        """The tensor `name`, mapped. Raises: BadModelFile naming the file and the tensor."""
        file, gguf_name = self._find(name)
        return file.get(gguf_name)

    def rope_factors(self) -> tuple[float, ...]:
        """The factors that divide the base frequencies (`rope_freqs.weight`); () if the file has none."""
        file = self._side.get(ROPE_FREQS)
        return () if file is None else tuple(float(x) for x in dequantize(file.get(ROPE_FREQS)).ravel())

    def close(self) -> None:
        """Drop the maps; arrays handed out keep theirs alive."""
        self._files.clear()
        self._where.clear()
        self._side.clear()

    def _find(self, name: str) -> tuple[GGUFFile, Any]:
        found = self._where.get(name)
        if found is None:
            raise BadModelFile(f"{self.label}: tensor {name} is missing.")
        return found
