"""What of a model folder goes with it wherever it is written, whatever its weights are."""

from __future__ import annotations

from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import open_file

GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
# Of a model folder, what no tokenizer or template is: weights in any format, what a run of training left, the card.
NOT_CARRIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
NOT_CARRIED += (".ot", ".npz", ".md", ".py", ".log", ".jsonl", ".parquet", ".arrow", ".csv", ".yaml", ".gz")
NOT_CARRIED += ("trainer_state.json", "_results.json")


def carried_files(folder: Path) -> list[Path]:
    """Files of a model folder beside weights, config.json and generation_config.json: tokenizer, templates, licence.

    By their names. Raises InputError where the folder, or one of them, cannot be read.
    """
    try:
        found = [*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}; make it readable") from None
    mine = [file for file in sorted(found) if not (file.name.startswith(".") or file.name.endswith(NOT_CARRIED))]
    files = [file for file in mine if file.name not in ("config.json", GENERATION) and not file.is_dir()]
    for file in files:
        open_file(file, "make it readable, or download it again").close()
    return files
