#!/usr/bin/env bash
# Trains a small GPT on this machine: 4 processes, 2 stages x 2 pipelines, over an emulated four-city network.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh ""
python scripts/launch.py --config=configs/quickstart.py --emulate=configs/networks/four_cities.json \
    --run_dir=runs/quickstart --overwrite "$@"
echo
python scripts/sample.py --run_dir=runs/quickstart --prompt="It is a truth " --n_tokens=300
echo
echo "runs/quickstart holds summary.json, metrics.jsonl, report.png and timeline.json (open it in ui.perfetto.dev)"
python - <<'CHECK'
import json
import sys

summary = json.load(open("runs/quickstart/summary.json"))
first, last = summary["loss_first"], summary["loss_last"]
has_learned = last < 0.8 * first
verdict = "the model has learned" if has_learned else "the model has not learned, expected a loss below 0.8 of the first"
print(f"{verdict}: loss {first:.4f} -> {last:.4f}")
sys.exit(0 if has_learned else 1)
CHECK
