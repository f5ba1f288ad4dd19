"""GGUF as weights: names, shapes, values, splits and damage. The gguf library writes the files and is the oracle of the reader."""

import logging
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize as library_dequantize

from fixtures.tiny_models import interleave_rows, make_hf_checkpoint, random_blocks, read_hf_tensors, write_gguf
from rootlet.config.model_load import load_model_config
from rootlet.core.errors import BadModelFile
from rootlet.formats.gguf import GGUFFile
from rootlet.formats.weights import dequantize, open_weights


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def llama31(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_checkpoint(tmp_path_factory.mktemp("llama31"), "llama31", num_hidden_layers=2)


@pytest.fixture(scope="module")
def gguf_f32(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(llama, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def pieces(llama: Path, tmp_path: Path) -> list[Path]:
    write_gguf(llama, tmp_path / "tiny.gguf", split_max_tensors=8)
    found = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(found) == 3
    return found


def test_reader_agrees_with_the_library(gguf_f32: Path) -> None:
    ours, library = GGUFFile(gguf_f32), GGUFReader(gguf_f32)
    assert {n: (t.shape, t.offset) for n, t in ours.tensors.items()} == {
        t.name: (tuple(reversed(t.shape.tolist())), t.data_offset) for t in library.tensors
    }
    for key, field in library.fields.items():
        if not key.startswith("GGUF."):
            assert ours.value(key) == field.contents(), key


def test_names_and_values_equal_safetensors(llama: Path, gguf_f32: Path) -> None:
    weights, reference = open_weights(gguf_f32), read_hf_tensors(llama)
    assert sorted(weights.names()) == sorted(reference)
    for name, array in reference.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        np.testing.assert_array_equal(weights.get(name).data, interleave_rows(array, heads) if heads else array)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_row_69_kinds_round_trip(llama: Path, tmp_path: Path, kind: str) -> None:
    weights = open_weights(write_gguf(llama, tmp_path / "m.gguf", kind=kind))
    raw, exact = weights.get("model.layers.1.mlp.up_proj.weight"), read_hf_tensors(llama)["model.layers.1.mlp.up_proj.weight"]
    assert (raw.kind, raw.shape) == (kind, (96, 64))
    assert raw.data.shape == ((96, 64) if kind in ("f16", "bf16") else (96, raw.data.shape[1]))
    assert raw.data.dtype == {"f16": np.float16, "bf16": np.uint16}.get(kind, np.uint8)
    values = dequantize(raw)
    assert values.dtype == np.float32
    limit = {"f16": 1e-3, "bf16": 8e-3, "q8_0": 8e-3, "q4_0": 0.13, "q4_1": 0.1, "q5_0": 0.07, "q5_1": 0.05}[kind]
    assert np.abs(values - exact).max() <= limit * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q5_k"])
def test_row_69_k_quants_are_read(tmp_path: Path, kind: str) -> None:
    blocks = random_blocks(kind, 8, 512)
    writer = GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = open_weights(tmp_path / "k.gguf").get("model.layers.0.mlp.up_proj.weight")
    assert (raw.kind, raw.shape, raw.data.tolist()) == (kind, (8, 512), blocks.tolist())
    np.testing.assert_array_equal(dequantize(raw), library_dequantize(blocks, GGMLQuantizationType[kind.upper()]))
    assert np.isfinite(dequantize(raw)).all()


def test_row_69_tied_head_and_rope_freqs(llama31: Path, tmp_path: Path) -> None:
    config = load_model_config(write_gguf(llama31, tmp_path / "m.gguf"))
    assert config.tie_embeddings
    assert config.rope.kind == "default"
    assert config.rope.interleaved
    assert (len(config.rope.factors), config.rope.factors[0], config.rope.factors[-1]) == (8, 1.0, 8.0)


def test_row_69_rope_factors_give_the_frequencies_of_transformers(llama31: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = load_model_config(write_gguf(llama31, tmp_path / "m.gguf")).rope
    reference, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(llama31), "cpu")
    ours = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim) / np.array(rope.factors)
    np.testing.assert_allclose(ours, reference.numpy(), rtol=1e-5)


def test_row_69_unknown_extra_tensor_warns(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf", extra={"blk.0.strange.weight": np.ones(4, np.float32)})
    with caplog.at_level(logging.WARNING):
        load_model_config(path)
    assert "blk.0.strange.weight" in caplog.text


def test_row_69_missing_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf", skip=("blk.1.ffn_down.weight",))
    with pytest.raises(BadModelFile, match=r"m\.gguf: missing tensors: model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model_config(path)


def test_row_71_any_piece_or_the_folder_loads_all(pieces: list[Path], gguf_f32: Path) -> None:
    whole = open_weights(gguf_f32)
    for path in [*pieces, pieces[0].parent]:
        weights = open_weights(path)
        assert sorted(weights.names()) == sorted(whole.names())
        assert load_model_config(path).num_layers == 2
        for name in whole.names():
            np.testing.assert_array_equal(weights.get(name).data, whole.get(name).data)


def test_row_71_missing_piece_is_named(pieces: list[Path]) -> None:
    pieces[2].unlink()
    for path in (pieces[0], pieces[0].parent):
        with pytest.raises(BadModelFile, match=r"missing: tiny-00003-of-00003\.gguf"):
            open_weights(path)


def test_row_71_renamed_piece_says_so(pieces: list[Path]) -> None:
    pieces[0].rename(pieces[0].with_name("other.gguf"))
    with pytest.raises(BadModelFile, match=r"other\.gguf: one piece of a split of 3"):
        open_weights(pieces[0].with_name("other.gguf"))


def test_row_71_piece_of_another_split_is_named(pieces: list[Path], llama: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write_gguf(llama, tmp_path / "b" / "tiny.gguf", split_max_tensors=12)
    shutil.copy(tmp_path / "b" / "tiny-00002-of-00002.gguf", pieces[1])
    with pytest.raises(BadModelFile, match=r"tiny-00002-of-00003\.gguf: it says that it is piece 2 of 2"):
        open_weights(pieces[0])


def test_row_71_folder_with_two_models_is_refused(pieces: list[Path], gguf_f32: Path) -> None:
    shutil.copy(gguf_f32, pieces[0].parent / "second.gguf")
    with pytest.raises(BadModelFile, match=r"2 GGUF models.*second\.gguf"):
        open_weights(pieces[0].parent)


def test_row_71_pieces_that_repeat_or_lack_a_tensor_are_refused(pieces: list[Path]) -> None:
    with_last = next(p for p in pieces if b"blk.1.ffn_up.weight" in p.read_bytes())
    original = with_last.read_bytes()
    with_last.write_bytes(original.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(BadModelFile, match=r"tensor blk\.0\.ffn_up\.weight (is also in tiny-0000\d-of-00003\.gguf|occurs twice)"):
        open_weights(pieces[0])
    with_last.write_bytes(original)
    for path in pieces:
        data = bytearray(path.read_bytes())
        at = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
        data[at] += 1
        path.write_bytes(data)
    with pytest.raises(BadModelFile, match=r"the split should hold 22 tensors, its pieces hold 21"):
        open_weights(pieces[0])


def test_a_projector_beside_the_model_is_not_the_model(gguf_f32: Path, tmp_path: Path) -> None:
    for name in ("m.gguf", "mmproj-m.gguf"):
        shutil.copy(gguf_f32, tmp_path / name)
    assert open_weights(tmp_path).label == "m.gguf"


def test_truncated_file_names_the_tensor(gguf_f32: Path, tmp_path: Path) -> None:
    data = gguf_f32.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-100])
    with pytest.raises(BadModelFile, match=r"cut\.gguf: truncated: tensor \S+ should end at byte \d+, but the file has \d+ bytes"):
        open_weights(tmp_path / "cut.gguf")


@pytest.mark.parametrize("alignment", [8, 256])
def test_data_begins_at_the_alignment_that_the_file_states(tmp_path: Path, alignment: int) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(alignment)
    values = {"output_norm.weight": np.arange(5, dtype=np.float32), "blk.0.attn_norm.weight": np.arange(7, dtype=np.float32)}
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "a.gguf")
    for name, array in values.items():
        np.testing.assert_array_equal(file.get(name).data, array)


def test_cut_anywhere_is_a_clear_error(gguf_f32: Path, tmp_path: Path) -> None:
    data = gguf_f32.read_bytes()
    for size in [0, 1, 4, 7, 8, 20, 24, 30, 100, 1000, 3000, 5000, 9000]:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(BadModelFile, match=r"cut\.gguf"):
            open_weights(tmp_path / "cut.gguf")


def test_bad_magic_version_and_type_are_named(gguf_f32: Path, tmp_path: Path) -> None:
    data = bytearray(gguf_f32.read_bytes())
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGML" + data[4:])
    with pytest.raises(BadModelFile, match="not a GGUF file"):
        open_weights(path)
    path.write_bytes(data[:4] + struct.pack("<I", 9) + data[8:])
    with pytest.raises(BadModelFile, match="GGUF version 9"):
        open_weights(path)
    path.write_bytes(data[:4] + struct.pack(">I", 3) + data[8:])
    with pytest.raises(BadModelFile, match="a big-endian GGUF file"):
        open_weights(path)
    path.write_bytes(bytes(data).replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"))
    with pytest.raises(BadModelFile, match=r"key tokenizer\.ggml\.eos_token_id occurs twice"):
        open_weights(path)
    path.write_bytes(bytes(data).replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(BadModelFile, match=r"tensor blk\.0\.ffn_up\.weight occurs twice"):
        open_weights(path)
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path.write_bytes(data[:at] + struct.pack("<I", 999) + data[at + 4 :])
    with pytest.raises(BadModelFile, match=r"tensor output_norm\.weight has the unknown type 999"):
        open_weights(path)


def moved(path: Path, name: str, offset: int) -> Path:
    """`path` with the data of tensor `name` said to begin `offset` bytes into the data."""
    data = path.read_bytes()
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    at += 4 + 8 * struct.unpack_from("<I", data, at)[0] + 4
    out = path.with_name("moved.gguf")
    out.write_bytes(data[:at] + struct.pack("<Q", offset) + data[at + 8 :])
    return out


def test_a_tensor_off_the_grid_or_over_another_is_damage(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf")
    first = min(GGUFFile(path).tensors.values(), key=lambda t: t.offset).name
    with pytest.raises(BadModelFile, match=r"tensor output_norm\.weight starts at 4, which is no multiple of the alignment 32"):
        open_weights(moved(path, "output_norm.weight", 4))
    with pytest.raises(BadModelFile, match=rf"tensors {first} and output_norm\.weight overlap|tensors output_norm\.weight and {first} overlap"):
        open_weights(moved(path, "output_norm.weight", 0))


def test_array_outlives_close_and_writes_stay_private(gguf_f32: Path) -> None:
    before = gguf_f32.read_bytes()
    weights = open_weights(gguf_f32)
    data = weights.get("model.norm.weight").data
    weights.close()
    data[0] = 7.0
    assert data[0] == 7.0
    assert gguf_f32.read_bytes() == before
