"""Make a model folder, with which runs can begin, of a model that exists.

    python scripts/tools/import_model.py --from=DIR|FILE.gguf --out=models/x
    python scripts/launch.py --config=configs/baseline.py --init_from=models/x --run_dir=runs/x

DIR is what transformers saves or a hub holds: config.json, model.safetensors in one file or several shards, and a
tokenizer. Its model_type is one of gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe. A GGUF file may be
quantised. Parameters become fp32. Needs the extra hf, and no torch. docs/models.md says more.
"""

from pathlib import Path

from absl import flags

from jaxdt.cli import script_main
from jaxdt.interop.gguf_file import GGUFFile
from jaxdt.interop.hf_files import HFFolder
from jaxdt.interop.import_model import import_model
from jaxdt.run.errors import BadInput

FROM = flags.DEFINE_string("from", None, "The folder of a model of Hugging Face, or a GGUF file.")
OUT = flags.DEFINE_string("out", None, "The model folder to write, a new one.")


def main() -> int:
    if not FROM.value or not OUT.value:
        raise BadInput(f"--{'out' if FROM.value else 'from'}: missing, see --help")
    is_gguf = FROM.value.endswith(".gguf") or Path(FROM.value).is_file()
    source = GGUFFile(Path(FROM.value)) if is_gguf else HFFolder(Path(FROM.value))
    record = import_model(source, Path(OUT.value))
    about, facts = source.options, source.options.facts
    shape = f"{about.family}, {facts.n_layers} layers, {facts.n_params:,} parameters, vocabulary {facts.vocab_size}"
    print(f"{OUT.value}: {shape}, samples of at most {about.max_len} tokens, digest {record.digest:.16}")
    return 0


if __name__ == "__main__":
    script_main.run(main)
