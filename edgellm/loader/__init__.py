"""Reads GGUF files: our own parser, memory-mapped tensors, shards."""
