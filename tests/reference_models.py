"""The model of each family written out once more, in plain jnp under autodiff, to hold the stage functions against; and
configs that between them use every option."""

import gpt_reference
import jax
import jax.numpy as jnp
import llama_reference
import moe_reference

from jaxdt.model.base import apply_stage

REFERENCES = {"gpt": gpt_reference, "llama": llama_reference, "moe": moe_reference}
CONFIGS = gpt_reference.CONFIGS | llama_reference.CONFIGS | moe_reference.CONFIGS


def logits(config, params, tokens_BT):
    """A module of one's own is not written once more: its reference is the whole model in one stage."""
    if config.family not in REFERENCES:
        return apply_stage(config, 0, config.facts.n_layers, jnp.dtype(jnp.float32), params, tokens_BT)
    return REFERENCES[config.family].logits(config, params, tokens_BT)


def loss_sum(config, params, tokens_BT, targets_BT):
    return _cross_entropy(logits(config, params, tokens_BT), targets_BT)


def objective(config, params, tokens_BT, targets_BT):
    """(what is minimised, the loss that is reported), both sums over samples."""
    if config.family != "moe":
        loss = loss_sum(config, params, tokens_BT, targets_BT)
        return loss, loss
    logits_BTV, auxiliary = moe_reference.logits_and_auxiliary(config, params, tokens_BT)
    loss = _cross_entropy(logits_BTV, targets_BT)
    return loss + auxiliary, loss


def _cross_entropy(logits_BTV, targets_BT):
    logp_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
    picked_BT = jnp.take_along_axis(logp_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked_BT) / targets_BT.shape[1]
