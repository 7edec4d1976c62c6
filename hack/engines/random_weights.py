"""Give a shrunk model folder weights: random ones, of the size that training begins with, the same in every run.

    ENGINE_PYTHON hack/engines/random_weights.py FOLDER

vLLM's own dummy weights are so small that all logits are zero: two images then have one answer. With these every pixel
shows in the probabilities. Runs in an engine's environment, which has torch and transformers.
"""

import sys
import tempfile
from pathlib import Path

SEED = 7
WEIGHTS = "model.safetensors"


def main(folder: Path) -> None:
    """Write the folder's weights; its configuration stays as it is."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText  # type: ignore[import-not-found]

    torch.manual_seed(SEED)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        model.save_pretrained(made)
        Path(made, WEIGHTS).rename(folder / WEIGHTS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
