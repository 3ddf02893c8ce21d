"""Print the folder of the recipes, for ``torchrun FOLDER/train_pnn.py`` and for copies.

Run it as ``python -m torchrec_stream_ckpt.recipes``.
"""

from pathlib import Path

print(Path(__file__).parent)
