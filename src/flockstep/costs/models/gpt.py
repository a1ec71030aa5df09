"""The shape of decoder-only transformers, such as GPT-2 small (Radford et al. 2019, table 2)."""

from __future__ import annotations

import dataclasses

from flockstep.costs import formulas
from flockstep.costs.layers import Layer, ModelShape


def gpt_2_small() -> ModelShape:
    """Return the shape of GPT-2 small: 12 layers of width 768, 12 heads, 1,024 tokens per sample, with 124,439,808
    parameters.
    """
    return gpt("gpt-2-small")


def gpt(
    name: str, layers: int = 12, width: int = 768, heads: int = 12, context: int = 1024, symbols: int = 50257
) -> ModelShape:
    """Return the shape of a decoder-only transformer on samples of `context` tokens.

    The output layer shares the embedding's weights, without biases.

    Attention is counted over all pairs of tokens, including masked pairs, as dense kernels compute attention.
    """
    stream = context * width
    made: list[Layer] = [
        formulas.embedding("tokens", symbols, width, context),
        dataclasses.replace(formulas.embedding("positions", context, width, context), after=()),
        dataclasses.replace(formulas.total("embed", stream), after=("tokens", "positions")),
    ]
    for index in range(layers):
        made += _block(str(index), made[-1].name, width, heads, context)
    made.append(formulas.group_norm("norm", stream, width, width, width))
    head = formulas.linear("head", width, symbols, context, bias=False)
    made.append(dataclasses.replace(head, parameters=0, tied="tokens"))
    note = f"{context:,} tokens per sample; input and output embedding share their weights; dropout is left out"
    return ModelShape(name, tuple(made), note=note)


def _block(name: str, before: str, width: int, heads: int, context: int) -> list[Layer]:
    """Attention and a perceptron, each with normalization before it and a residual connection."""
    stream = context * width
    return [
        formulas.group_norm(f"{name}.norm1", stream, width, width, width),
        formulas.linear(f"{name}.qkv", width, 3 * width, context),
        formulas.attention(f"{name}.attention", heads, context, context, width // heads),
        formulas.linear(f"{name}.project", width, width, context),
        dataclasses.replace(formulas.total(f"{name}.add1", stream), after=(f"{name}.project", before)),
        formulas.group_norm(f"{name}.norm2", stream, width, width, width),
        formulas.linear(f"{name}.up", width, 4 * width, context),
        formulas.activation(f"{name}.gelu", 4 * stream),
        formulas.linear(f"{name}.down", 4 * width, width, context),
        dataclasses.replace(formulas.total(f"{name}.add2", stream), after=(f"{name}.down", f"{name}.add1")),
    ]
