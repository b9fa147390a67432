"""Architectures by their GGUF name. Importing this loads no backend and no model file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgellm.errors import UnsupportedModel
from edgellm.models.config import ModelConfig
from edgellm.models.metadata import Metadata

if TYPE_CHECKING:
    from edgellm.backends.base import Backend, QTensor
    from edgellm.loader import GGUFFile
    from edgellm.models.decoder import Decoder as Model

__all__ = ["SUPPORTED", "config_from_metadata", "load_model", "model_class"]

_CLASSES = {
    "afmoe": "afmoe.AfMoE",
    "apertus": "apertus.Apertus",
    "arcee": "arcee.Arcee",
    "bailingmoe": "bailingmoe.BailingMoE",
    "bailingmoe2": "bailingmoe2.BailingMoE2",
    "bert": "bert.Bert",
    "chatglm": "chatglm.ChatGLM",
    "cohere2": "cohere2.Cohere2",
    "command-r": "command_r.CommandR",
    "deepseek": "bailingmoe.BailingMoE",
    "deepseek2": "deepseek2.DeepSeek2",
    "dots1": "dots1.Dots1",
    "ernie4_5": "ernie4_5.Ernie45",
    "ernie4_5-moe": "ernie4_5_moe.Ernie45MoE",
    "eurobert": "eurobert.EuroBert",
    "exaone": "exaone.Exaone",
    "exaone4": "exaone4.Exaone4",
    "falcon": "falcon.Falcon",
    "gemma": "gemma.Gemma",
    "gemma-embedding": "gemma_embedding.GemmaEmbedding",
    "gemma2": "gemma2.Gemma2",
    "gemma3": "gemma3.Gemma3",
    "glm4": "glm4.Glm4",
    "glm4moe": "glm4moe.Glm4MoE",
    "gpt-oss": "gpt_oss.GptOss",
    "gpt2": "gpt2.GPT2",
    "gptneox": "gptneox.GPTNeoX",
    "granite": "granite.Granite",
    "granitemoe": "granitemoe.GraniteMoE",
    "hunyuan-dense": "hunyuan.Hunyuan",
    "hunyuan-moe": "hunyuan.Hunyuan",
    "hunyuan_vl": "hunyuan.Hunyuan",
    "internlm2": "llama.Llama",
    "llama": "llama.Llama",
    "llama-embed": "eurobert.EuroBert",
    "minicpm": "minicpm.MiniCPM",
    "minicpm3": "minicpm3.MiniCPM3",
    "minimax-m2": "minimax_m2.MiniMaxM2",
    "mistral3": "mistral3.Mistral3",
    "modern-bert": "modern_bert.ModernBert",
    "nemotron": "nemotron.Nemotron",
    "nomic-bert": "nomic_bert.NomicBert",
    "nomic-bert-moe": "nomic_bert_moe.NomicBertMoE",
    "olmo": "olmo.Olmo",
    "olmo2": "olmo2.Olmo2",
    "olmoe": "olmoe.OLMoE",
    "phi2": "phi2.Phi2",
    "phi3": "phi3.Phi3",
    "qwen": "qwen.Qwen",
    "qwen2": "qwen2.Qwen2",
    "qwen2moe": "qwen2moe.Qwen2MoE",
    "qwen2vl": "qwen2.Qwen2",
    "qwen3": "qwen3.Qwen3",
    "qwen3moe": "qwen3moe.Qwen3MoE",
    "qwen3vl": "qwen3.Qwen3",
    "qwen3vlmoe": "qwen3moe.Qwen3MoE",
    "seed_oss": "seed_oss.SeedOss",
    "smollm3": "smollm3.SmolLM3",
    "stablelm": "stablelm.StableLM",
    "starcoder": "gpt2.GPT2",
    "starcoder2": "starcoder2.StarCoder2",
}
"""`general.architecture` -> module and class in this package."""

SUPPORTED = tuple(sorted(_CLASSES))


def model_class(arch: str) -> type[Model]:
    """The class that reads and runs an architecture; UnsupportedModel when there is none."""
    if arch not in _CLASSES:
        raise UnsupportedModel(f"architecture {arch[:60]!r} is not supported; supported are: {', '.join(SUPPORTED)}")
    module, name = _CLASSES[arch].split(".")
    found: type[Model] = getattr(importlib.import_module(f"edgellm.models.{module}"), name)
    return found


def config_from_metadata(metadata: Mapping[str, Any]) -> ModelConfig:
    """Shape and constants of the model a file describes.

    Raises UnsupportedModel: unknown architecture (with the list of known ones), or a key that is missing or wrong.
    """
    meta = Metadata(metadata)
    return model_class(meta.arch).read_config(meta)


def load_model(gguf: GGUFFile, backend: Backend) -> Model:
    """The model of an open file on a backend. The weights are views of the file, which must stay open.

    Raises UnsupportedModel as `config_from_metadata` does, and for the first tensor that is missing, of a wrong shape
    or of no use to the architecture.
    """
    from edgellm.models.tensors import Tensors

    config = config_from_metadata(gguf.metadata)
    config = replace(config, vocab_size=config.vocab_size or _embedding_rows(gguf.tensors))
    tensors = Tensors(gguf.tensors, backend)
    model = model_class(config.arch)(config, tensors)
    tensors.check_all_used(config)
    return model


def _embedding_rows(tensors: Mapping[str, QTensor]) -> int:
    """Vocabulary size where the metadata has none."""
    return tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0
