"""The embedded target for llama.cpp: its own Q4_1 file, and the same weights stored as F16 or Q8_0.

Files made here are kept in the user cache. Matrices change their type, gains stay in F32; the tokenizer and everything
else are copied. Used by `decode_peers`; no command of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

from dspine_probe.embedded import GGUF, embedded_folder
from dspine_probe.files import cache_dir, write_atomically

KINDS = {
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "Q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
WRITTEN_BY_ITSELF = ("general.architecture", "general.file_type")


def gguf_file(kind: str) -> Path:
    """The target as "F16", "Q8_0" or "Q4_1", made first where it is absent."""
    source = embedded_folder().parent / GGUF
    if kind == "Q4_1":
        return source
    made = cache_dir() / "gguf" / f"{source.stem.rsplit('.', 1)[0]}.{kind}.gguf"
    if not made.is_file():
        write_atomically(made, lambda path: _convert(source, path, kind))
    return made


def _convert(source: Path, destination: Path, kind: str) -> None:
    reader = GGUFReader(source)
    number, file_type = KINDS[kind]
    writer = GGUFWriter(destination, arch=reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in WRITTEN_BY_ITSELF:
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        data = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, quants.quantize(data, number), raw_dtype=number)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
