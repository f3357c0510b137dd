"""The sizes of a GPT by hand, to hold the facts against that are read off its functions."""

from jaxdt.run.families.gpt import GPTConfig


def up_width(c: GPTConfig) -> int:
    """Columns of a layer's up-projection."""
    return c.d_ff * (2 if c.activation == "geglu" else 1)


def block_params(c: GPTConfig) -> int:
    """Two LayerNorms, the projections of attention, and the two of the feed-forward part."""
    d, ff = c.d_model, c.d_ff
    up = d * up_width(c) + up_width(c)
    return 4 * d + (d * 3 * d + 3 * d) + (d * d + d) + up + (ff * d + d)


def table_params(c: GPTConfig) -> int:
    return c.vocab_size * c.d_model


def position_params(c: GPTConfig) -> int:
    return c.seq_len * c.d_model if c.positions == "learned" else 0


def head_params(c: GPTConfig) -> int:
    return 2 * c.d_model + (0 if c.tied_head else table_params(c))


def sender_params(c: GPTConfig) -> int:
    """LayerNorm over the width, with a bottleneck the linear layer, LayerNorm over the narrow width."""
    d, narrow = c.d_model, c.d_model // c.compression_ratio
    linear = d * narrow + narrow if c.compression_kind == "bottleneck" else 0
    return 2 * d + linear + 2 * narrow


def receiver_params(c: GPTConfig) -> int:
    return (c.d_model // c.compression_ratio) * c.d_model + c.d_model


def senders_in(c: GPTConfig, lo: int, hi: int) -> list[int]:
    """The stage that ends at such a layer has the narrowing half."""
    return [layer for layer in c.compression_after if lo < layer <= hi]


def receivers_in(c: GPTConfig, lo: int, hi: int) -> list[int]:
    return [layer for layer in c.compression_after if lo <= layer < hi]


def blocks_in(c: GPTConfig, lo: int, hi: int) -> list[int]:
    return sorted({c.block_of(layer) for layer in range(lo, hi)})


def stage_params(c: GPTConfig, lo: int, hi: int) -> int:
    """A tied head on a last stage of several counts its own table."""
    n = len(blocks_in(c, lo, hi)) * block_params(c)
    n += len(senders_in(c, lo, hi)) * sender_params(c) + len(receivers_in(c, lo, hi)) * receiver_params(c)
    if lo == 0:
        n += table_params(c) + position_params(c)
    if hi == c.n_layers:
        n += head_params(c) + (table_params(c) if c.tied_head and lo > 0 else 0)
    return n


def fragment_params(c: GPTConfig, lo: int, hi: int, fragment: int, n_fragments: int) -> int:
    """The blocks of a stage go to the fragments in turn, with what stands before or behind them."""
    blocks = blocks_in(c, lo, hi)[fragment::n_fragments]
    of_tables = table_params(c) + position_params(c) if 0 in blocks else 0
    of_head = head_params(c) if c.block_of(c.n_layers - 1) in blocks else 0
    n_senders = sum(c.block_of(layer - 1) in blocks for layer in senders_in(c, lo, hi))
    n_receivers = sum(c.block_of(layer) in blocks for layer in receivers_in(c, lo, hi))
    of_pairs = n_senders * sender_params(c) + n_receivers * receiver_params(c)
    return len(blocks) * block_params(c) + of_tables + of_head + of_pairs


def boundary_width(c: GPTConfig, layer: int) -> int:
    return c.d_model // c.compression_ratio if layer in c.compression_after else c.d_model


def saved(c: GPTConfig, lo: int, hi: int) -> int:
    """Numbers of a token that remat "dots" keeps of a stage without compression pairs."""
    n = hi - lo
    return n * (4 * c.d_model + up_width(c)) + (n - 1) * c.d_model


def working(c: GPTConfig, lo: int, hi: int) -> float:
    """Numbers of a token that the backward of a stage without compression pairs computes at once."""
    return (hi - lo) * (10 * c.d_model + 2 * up_width(c) + 4 / 3 * c.n_heads * c.seq_len)


def flops(c: GPTConfig, lo: int, hi: int, n_tokens: int) -> int:
    """FLOP of the forward of a sample, without compression pairs: two for each weight, and two for each pair of tokens
    and number of the width, for the scores and for what they weigh."""
    d = c.d_model
    layer = 2 * (d * 3 * d + d * d + d * up_width(c) + c.d_ff * d) + 4 * d * n_tokens
    head = 2 * table_params(c) if hi == c.n_layers else 0
    return n_tokens * ((hi - lo) * layer + head)
