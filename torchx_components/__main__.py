"""``python -m torchrec_stream_ckpt.components``: print the folder, for ``torchx run FOLDER/train.py:dlrm``."""

from pathlib import Path

print(Path(__file__).parent)
