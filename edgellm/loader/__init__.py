"""Reader of GGUF model files: memory-mapped tensors, metadata decoded on access, split models."""

from edgellm.loader.file import GGUFFile, check_file, open_gguf
from edgellm.loader.header import Header, Incomplete, TensorInfo, parse_header
from edgellm.loader.values import Metadata

__all__ = ["GGUFFile", "Header", "Incomplete", "Metadata", "TensorInfo", "check_file", "open_gguf", "parse_header"]
