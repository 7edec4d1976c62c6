"""Tokenizers as an engine's own code loads them, and models of SentencePiece, by the packages of its environment.

    python own_tokenizer.py vllm|sglang < [{"folder": ..., "texts": [...]}, ...]
    python own_tokenizer.py train < [{"text": ..., "options": {...}}, ...]

The last line of the output is a JSON array. For each folder: ``ids`` of every text, without and with what is put around
it, and ``parts``, the tokenizer as the library ``tokenizers`` writes it, if it is one of that. For each training: the
file, in base64.
"""

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any


def tokenized(folder: str, texts: list[str]) -> dict[str, Any]:
    if sys.argv[1] == "vllm":
        from vllm.tokenizers import get_tokenizer
    else:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    tokenizer = get_tokenizer(folder, trust_remote_code=any(Path(folder).glob("*.py")))
    ids = [[tokenizer.encode(text, add_special_tokens=special) for special in (False, True)] for text in texts]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {"ids": ids, "parts": backend and json.loads(backend.to_str())}


def trained(text: str, options: dict[str, Any]) -> str:
    from sentencepiece import SentencePieceTrainer

    made = io.BytesIO()
    lines = iter([line for line in text.splitlines() if line])
    SentencePieceTrainer.train(sentence_iterator=lines, model_writer=made, num_threads=1, **options)
    return base64.b64encode(made.getvalue()).decode()


def main() -> None:
    output, sys.stdout = sys.stdout, sys.stderr  # logs are no part of the answer
    answer = trained if sys.argv[1:] == ["train"] else tokenized
    answers = [answer(**asked) for asked in json.load(sys.stdin)]
    output.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
