"""SWARM's large model: the compute of 13 billion parameters in 1 billion (SWARM, Sec. 4.3 and App. H).

    python scripts/launch.py --config=configs/swarm_1b.py --config.data.path=TOKENS --emit=runs/swarm_1b --hosts=A,B,...

TOKENS is a file of scripts/prepare_data.py with the tokenizer gpt2.

Hardware: 24 hosts with a GPU each, which needs 18 to 22 GB by jaxdt/run/memory.py. Expected: this config has been
counted, but never run. It has 1.011e9 parameters with the tied head (3 GeGLU blocks of 2.685e8, a token table of
2.059e8, the final LayerNorm). Each of the 3 stages applies its one block 16 times, so 1.289e10 block parameters are
applied to each token. Samples grow from 256 to 2048 tokens over 12,000 steps, in 4 lengths.

From the paper: width 4096, 32 heads, feed-forward width 16384, GeGLU, rotary positions, 3 stages, the vocabulary of
GPT-2, LAMB with learning rate 1e-3 and beta2 0.95, batches of 16384, 8-bit boundaries, delayed updates, rebalancing
every 300 s. From its published code: eps 1e-6, weight decay 0.01, clipping at 1, 3125 warm-up steps. Our choices:
microbatches of one sample, 8 peers a stage (the paper had about 130), bf16, 15,000 steps, no delay in the first 50.
"""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("xxlarge")
    config.model.n_layers = 48
    config.model.n_shared_blocks = 3
    config.model.d_model = 4096
    config.model.n_heads = 32
    config.model.d_ff = 16384
    config.data.seq_len = 2048
    config.model.vocab_size = 50257
    config.model.positions = "rotary"
    config.model.activation = "geglu"
    config.model.tied_head = True
    config.plan.stages = 3
    config.plan.pipelines = 8
    config.plan.microbatches = 16384
    config.data.seq_start = 256
    config.data.seq_growth_steps = 12000
    config.train.steps = 15000
    config.train.microbatch_size = 1
    config.train.checkpoint_every_steps = 100
    config.optim.name = "lamb"
    config.optim.lr = 1e-3
    config.optim.b2 = 0.95
    config.optim.eps = 1e-6
    config.optim.weight_decay = 0.01
    config.optim.clip_norm = 1.0
    config.optim.warmup_steps = 3125
    config.wiring.kind = "swarm"
    config.wiring.routers = 8
    config.wiring.rebalance_s = 300.0
    config.sync.delay = 1
    config.sync.delay_after_steps = 50
    config.codec = "int8"
    config.dtype = "bfloat16"
    config.platform = "gpu"
    return config
