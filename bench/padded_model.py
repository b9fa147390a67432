"""A llama model made slower without changing its answers, or smaller by leaving layers out.

    python bench/padded_model.py IN.gguf OUT.gguf --layers 240      (zero layers appended)
    python bench/padded_model.py IN.gguf OUT.gguf --without 12,13   (layers left out)

An appended layer is a copy of an existing one with attn_output and ffn_down all zero: it adds nothing to the residual
stream and costs what a layer costs. So a padded SmolLM2 is a target for which SmolLM2 itself is a perfect draft; with
layers left out it is one that errs. Needs the `gguf` package.
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, n_layers: int) -> None:
    """All keys but the layer count."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        value = n_layers if name.endswith(".block_count") else field.contents()
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, kind)


def main() -> None:
    """Write OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, default=0, help="layers in all, zero ones appended")
    parser.add_argument("--without", default="", help="layers to leave out")
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.source)
    [n_old] = [int(f.contents()) for name, f in reader.fields.items() if name.endswith(".block_count")]
    left_out = {int(i) for i in args.without.split(",") if i}
    kept = [i for i in range(n_old) if i not in left_out]
    plan = kept + [kept[i % len(kept)] for i in range(max(0, args.layers - len(kept)))]
    writer = gguf.GGUFWriter(args.out, reader.fields["general.architecture"].contents())
    copy_metadata(reader, writer, len(plan))
    tensors = {t.name: t for t in reader.tensors}
    for name, tensor in tensors.items():
        if not name.startswith("blk."):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for new, old in enumerate(plan):
        for name, tensor in tensors.items():
            if name.startswith(f"blk.{old}."):
                data = tensor.data
                if new >= len(kept) and name.endswith((".attn_output.weight", ".ffn_down.weight")):
                    data = np.zeros_like(data)  # all-zero bytes are zero weights in every type used here
                writer.add_tensor(name.replace(f"blk.{old}.", f"blk.{new}.", 1), data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
