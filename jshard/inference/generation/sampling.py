"""How the next token is chosen: greedily, or at random from the likeliest ones.

Shape suffix: V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jshard.system.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p, in the order of transformers.

    Attributes:
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: only the k likeliest tokens remain (Fan et al. 2018, arXiv:1805.04833,
        section 5.1); 0 keeps all.
      top_p: only the fewest likeliest tokens remain whose probabilities add up to p or
        more (Holtzman et al. 2019, arXiv:1904.09751, section 3.1); 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature}: must be 0 or more")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k}: must be 0, for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1")


def sample(key: jax.Array, logits_V: jax.Array, sampling: Sampling) -> jax.Array:
    """Chooses a token, int32."""
    if not sampling.temperature:
        return jnp.argmax(logits_V).astype(jnp.int32)
    chosen = jax.random.categorical(key, filtered(logits_V, sampling))
    return chosen.astype(jnp.int32)


def filtered(logits_V: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the logits that are sampled from, -inf for tokens that are left out."""
    logits_V = logits_V / sampling.temperature
    keeps_all = not 0 < sampling.top_k < len(logits_V)
    if keeps_all and sampling.top_p == 1:
        return logits_V
    count = len(logits_V) if keeps_all else sampling.top_k
    likeliest, _ = lax.top_k(logits_V, count)  # in descending order
    probability = jax.nn.softmax(likeliest)
    likelier = jnp.cumsum(probability) - probability  # the sum of those before
    # The likeliest one stays whatever p is: nothing comes before it.
    kept = likelier < sampling.top_p
    least = jnp.min(likeliest, where=kept, initial=jnp.inf)
    return jnp.where(logits_V < least, -jnp.inf, logits_V)
