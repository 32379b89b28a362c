"""Files and folders appear whole or not at all."""

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import output_folder


def test_an_output_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RuntimeError):
        with output_folder(out) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError
    assert not list(tmp_path.iterdir())
    for text in ("one", "two"):
        with output_folder(out, force=True) as folder:
            (folder / "file").write_text(text)
    assert (out / "file").read_text() == "two" and [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(InputError, match="--force"):
        with output_folder(out):
            pass
