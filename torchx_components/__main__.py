"""``python -m torchx_components``: print the folder of the components, for ``torchx run FOLDER/train.py:dlrm``."""

from pathlib import Path

print(Path(__file__).parent)
