"""Names, and which file of a repository a tag means (case B30's rules)."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EdgeLLMError, ModelNotFound, RequestError
from edgellm.hub.choice import choose_files, model_files, quant_label
from edgellm.hub.names import Name, is_path, parse_name, parse_web_file

NAMES = {
    "llama3.3": ("registry.ollama.ai", "library", "llama3.3", "latest", "llama3.3:latest"),
    "llama3.3:70b-instruct-q4_K_M": ("registry.ollama.ai", "library", "llama3.3", "70b-instruct-q4_K_M", None),
    "user/model:t": ("registry.ollama.ai", "user", "model", "t", "user/model:t"),
    "registry.ollama.ai/library/m": ("registry.ollama.ai", "library", "m", "latest", "m:latest"),
    "ollama.com/library/m": ("registry.ollama.ai", "library", "m", "latest", "m:latest"),
    "hf.co/u/r:Q8_0": ("hf.co", "u", "r", "Q8_0", "hf.co/u/r:Q8_0"),
    "https://huggingface.co/u/r": ("hf.co", "u", "r", "latest", "hf.co/u/r:latest"),
    "hf:u/r": ("hf.co", "u", "r", "latest", "hf.co/u/r:latest"),
    "hf:u/r:q4_k_m": ("hf.co", "u", "r", "q4_k_m", "hf.co/u/r:q4_k_m"),
    "localhost:5000/lib/m:t": ("localhost:5000", "lib", "m", "t", "localhost:5000/lib/m:t"),
    "http://localhost:5000/lib/m": ("localhost:5000", "lib", "m", "latest", "localhost:5000/lib/m:latest"),
}


@pytest.mark.parametrize("text", NAMES)
def test_b30_names_are_read_from_the_right(text: str) -> None:
    host, namespace, model, tag, shown = NAMES[text]
    name = parse_name(text)
    assert (name.host, name.namespace, name.model, name.tag) == (host, namespace, model, tag)
    assert str(name) == (shown or text) and parse_name(str(name)).folded == name.folded
    assert name.insecure == text.startswith("http://")


BAD = ["", ":", "x:", "a/:b", "/x", "x/", "a//b", ".x", "-x", "a b", "x:..", "../../etc", "a/../b", "x\0y", "x\ny", "é"]
BAD += ["ftp://x/y/z", "a/b/c/d", "h:1/m", "n.s/m", "x" * 97, "x:" + "t" * 129, "..:x", "a..b", "hf:", "hf:u"]


@pytest.mark.parametrize("text", BAD)
def test_b30_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_name(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@given(st.text(max_size=60) | st.text(alphabet="a/.:-_\\~%\0@ ", max_size=40))
def test_no_part_of_a_name_leaves_its_folder(text: str) -> None:
    try:
        name = parse_name(text)
    except RequestError:
        return
    for part in (name.host, name.namespace, name.model, name.tag):
        assert part and "/" not in part and "\\" not in part and ".." not in part and not part.startswith((".", "-"))
        assert part.isprintable() and "\0" not in part


def test_links_and_files_of_the_hub() -> None:
    hub = parse_web_file("hf:u/r/sub/x-Q8_0.gguf")
    assert hub and hub.file == "sub/x-Q8_0.gguf" and str(hub.name) == "hf.co/u/r:x-Q8_0.gguf"
    link = parse_web_file("https://huggingface.co/u/r/resolve/v2/x.gguf?download=true")
    assert link and (link.file, link.revision) == ("x.gguf", "v2")
    other = parse_web_file("https://example.com:8443/a%20b/x%20y.gguf?sig=1")
    assert other and other.url.endswith("?sig=1") and other.name.host == "example.com:8443"
    assert other.name.model == "x-y" and other.name.namespace == "files"
    again = parse_web_file("https://example.com:8443/a%20b/x%20y.gguf?sig=2")
    assert again and again.name == other.name  # a link that was signed anew is the same model
    for text in ("llama3", "hf.co/u/r:x.gguf", "https://example.com/x", "/tmp/x.gguf", "hf:u/r:Q4_0"):
        assert parse_web_file(text) is None
    for text in ("hf:u/r/../x.gguf", "hf:u/r//x.gguf", "hf.co/a/b/../../x.gguf"):
        with pytest.raises(RequestError):
            parse_web_file(text)


def test_paths() -> None:
    assert is_path("x.gguf") and is_path("/a/b") and is_path("./m") and is_path("~/m") and is_path("a/b.gguf")
    assert not is_path("llama3") and not is_path("user/model") and not is_path("hf:u/r/x.gguf")
    assert not is_path("https://h/x.gguf") and not is_path("hf.co/u/r:x.gguf")


FILES = ["x-Q4_K_M.gguf", "x-q8_0.gguf", "mmproj-x.gguf", "x-Q6_K-00001-of-00002.gguf", "x-Q6_K-00002-of-00002.gguf"]
FILES += ["README.md", "x.imatrix", "imatrix-x.gguf"]


def test_b30_tags_of_a_repository() -> None:
    assert choose_files(FILES, "q4_k_m", "r") == ["x-Q4_K_M.gguf"]
    assert choose_files(FILES, "Q8_0", "r") == ["x-q8_0.gguf"]
    assert choose_files(FILES, "latest", "r") == ["x-Q4_K_M.gguf"]
    assert choose_files(FILES, "Q6_K", "r") == FILES[3:5]
    assert choose_files(FILES, "x-Q8_0.gguf", "r") == ["x-q8_0.gguf"]
    with pytest.raises(ModelNotFound, match="has no file for Q5_K_M; it has: Q4_K_M, Q6_K, q8_0"):
        choose_files(FILES, "Q5_K_M", "r")
    with pytest.raises(ModelNotFound, match="has no file for mmproj"):
        choose_files(FILES, "mmproj", "r")


def test_b30_no_tag() -> None:
    assert choose_files(["a-IQ4_XS.gguf", "a-Q8_0.gguf", "a-Q4_0.gguf"], "latest", "r") == ["a-Q4_0.gguf"]
    assert choose_files(["b-Q8_0.gguf", "a-F16.gguf"], "latest", "r") == ["a-F16.gguf"]
    with pytest.raises(ModelNotFound, match="no GGUF model file"):
        choose_files(["mmproj-a.gguf", "x.safetensors"], "latest", "r")
    assert choose_files(["a-IQ4_0.gguf", "a-Q4_0.gguf"], "Q4_0", "r") == ["a-Q4_0.gguf"]
    assert choose_files(["a-Q4_K_M.gguf", "a-Q4_K.gguf"], "q4_k", "r") == ["a-Q4_K.gguf"]


def test_b30_split_models() -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert choose_files([*parts, "z.gguf"], "latest", "r") == parts
    assert model_files(parts) == parts[:1]
    with pytest.raises(ModelNotFound, match=r"lacks .*00002-of-00003"):
        choose_files([parts[0], parts[2]], "latest", "r")


def test_quant_labels() -> None:
    known = {"a-Q4_K_M.gguf": "Q4_K_M", "A.Q8_0.gguf": "Q8_0", "m-UD-IQ2_XXS.gguf": "UD-IQ2_XXS", "x.gguf": "x"}
    known |= {"m-BF16-00001-of-00002.gguf": "BF16", "q4_0/model-f16.gguf": "f16", "qwen-q4-x.gguf": "qwen-q4-x"}
    assert {file: quant_label(file) for file in known} == known


@given(st.lists(st.text(alphabet="aQ4_-0K.gu/f1mo", max_size=30).map(lambda s: s + ".gguf")), st.text(max_size=20))
def test_any_listing_is_chosen_from_or_refused(files: list[str], tag: str) -> None:
    with contextlib.suppress(EdgeLLMError):
        assert set(choose_files(files, tag, "r")) <= set(files)


def test_a_name_checks_itself() -> None:
    with pytest.raises(RequestError):
        Name("hf.co", "u", "r", "../x")
