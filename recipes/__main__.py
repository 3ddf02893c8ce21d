"""``python -m torchrec_stream_ckpt.recipes``: print the folder, for ``torchrun FOLDER/train_pnn.py`` and for copies."""

from pathlib import Path

print(Path(__file__).parent)
