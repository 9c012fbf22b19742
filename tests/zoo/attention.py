"""Attention, transformers, and the parameters that come with tokens."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.case import Call, ids, keywords, normal, registry, several, weight

CASES, case = registry()


def padding_mask(tokens):
    """True where a key is padding; example i keeps its first 1 + i mod tokens keys."""
    return lambda n: torch.arange(tokens)[None] > (torch.arange(n) % tokens)[:, None]


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


# --- nn.MultiheadAttention


@case(normal(3, 4))
def mha_self():
    return Call(lambda m, x: m.attend(x, x, x)[0], attend=nn.MultiheadAttention(4, 2, batch_first=True))


@case(normal(3, 4))
def mha_self_without_weights():
    return Call(
        lambda m, x: m.attend(x, x, x, need_weights=False)[0],
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )


@case(normal(3, 4))
def mha_inside_a_network():
    return Call(
        lambda m, x: m.readout(torch.tanh(m.attend(*[torch.tanh(m.inner(x))] * 3, need_weights=False)[0])),
        inner=nn.Linear(4, 4),
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
        readout=nn.Linear(4, 1),
    )


@case(normal(3, 4), n=3, n2=3)
def mha_sequence_first():
    """Tokens on axis 0 inside, and as many tokens as examples: the axes cannot be told by length."""
    return Call(lambda m, x: m.attend(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), attend=nn.MultiheadAttention(4, 2))


@case(normal(3, 4))
def mha_no_bias():
    return Call(lambda m, x: m.attend(x, x, x)[0], attend=nn.MultiheadAttention(4, 1, bias=False, batch_first=True))


@case(several(normal(2, 4), normal(3, 4)))
def mha_cross():
    return Call(lambda m, q, k: m.attend(q, k, k)[0], attend=nn.MultiheadAttention(4, 2, batch_first=True))


@case(several(normal(2, 4), normal(3, 3), normal(3, 5)))
def mha_cross_unequal_widths():
    return Call(
        lambda m, q, k, v: m.attend(q, k, v)[0],
        attend=nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True),
    )


@case(several(normal(3, 4), normal(3, 4), normal(3, 4)), n=3)
def mha_three_inputs_sequence_first():
    return Call(
        lambda m, q, k, v: m.attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), need_weights=False)[
            0
        ].transpose(0, 1),
        attend=nn.MultiheadAttention(4, 2),
    )


@case(several(normal(3, 4), padding_mask(3)))
def mha_key_padding_mask():
    return Call(
        lambda m, x, mask: m.attend(x, x, x, key_padding_mask=mask)[0],
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )


@case(normal(3, 4))
def mha_attention_mask():
    return Call(
        lambda m, x: m.attend(x, x, x, attn_mask=causal(3), need_weights=False)[0],
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )


@case(several(normal(3, 4), padding_mask(3)))
def mha_both_masks_additive():
    return Call(
        lambda m, x, mask: m.attend(
            x,
            x,
            x,
            key_padding_mask=mask,
            attn_mask=causal(3).roll(1, 0).fill_diagonal_(False),
            need_weights=False,
        )[0],
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )


@case(normal(2, 4))
def mha_bias_kv():
    return Call(
        lambda m, x: m.attend(x, x, x)[0],
        attend=nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    )


@case(normal(2, 4), fallback_ok=True)
def mha_weights_are_the_output():
    """Attention probabilities, averaged over heads: the value and output projections are not reached."""
    return Call(lambda m, x: m.attend(x, x, x)[1], attend=nn.MultiheadAttention(4, 2, batch_first=True))


# --- transformer layers


@case(normal(2, 4))
def encoder_layer():
    return nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True)


@case(normal(2, 4))
def encoder_layer_norm_first_gelu():
    return nn.TransformerEncoderLayer(4, 2, 5, activation="gelu", norm_first=True, batch_first=True)


@case(normal(3, 4), n=3)
def encoder_layer_sequence_first():
    return Call(lambda m, x: m.layer(x.transpose(0, 1))[0], layer=nn.TransformerEncoderLayer(4, 2, 5, norm_first=True))


@case(several(normal(2, 4), padding_mask(2)))
def encoder_stack_masked():
    layer = nn.TransformerEncoderLayer(4, 2, 3, batch_first=True)
    return Call(
        lambda m, x, mask: m.stack(x, src_key_padding_mask=mask)[:, 0],
        stack=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    )


@case(several(normal(2, 4), normal(3, 4)))
def decoder_layer():
    return nn.TransformerDecoderLayer(4, 2, 5, batch_first=True)


@case(several(normal(2, 4), normal(3, 4)))
def decoder_layer_causal_norm_first():
    return Call(
        lambda m, x, memory: m.layer(x, memory, tgt_mask=causal(2)),
        layer=nn.TransformerDecoderLayer(4, 2, 3, activation="gelu", norm_first=True, batch_first=True),
    )


@case(several(normal(2, 4), normal(2, 4)), n=2)
def whole_transformer():
    return nn.Transformer(4, 2, 1, 1, 3, batch_first=True)


# --- written by hand


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values, heads split by view."""

    def __init__(self, width, heads, is_causal=True):
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, bias=None):
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self.is_causal and bias is None)
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


class Block(nn.Module):
    def __init__(self, width, heads, is_causal=True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = Attention(width, heads, is_causal)
        self.mlp = nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.Linear(5, width))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary=5, width=4, tokens=3):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.block, self.norm = Block(width, 2), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.block(x)))


@case(ids(5, 3), n=2, fallback_ok=("position.weight",))
def gpt_tied():
    return TinyGPT()


@case(ids(5, 3), n=3, n2=3, fallback_ok=("position.weight",))
def gpt_tied_as_many_tokens_as_examples():
    """The position ids 0..T-1 have no example axis, and T = n."""
    return TinyGPT()


class TinyViT(nn.Module):
    """Patches by a strided convolution, a class token, learned positions, layer scale."""

    def __init__(self, width=4):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.token, self.position = weight(1, 1, width), weight(1, 5, width)
        self.block, self.scale = Block(width, 2, is_causal=False), weight(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(x[:, 0] + self.scale * self.block(x)[:, 0])


@case(normal(1, 4, 4), fallback_ok=("token",))
def vit():
    return TinyViT()


@case(normal(2, 4))
def vit_block():
    return Block(4, 2, is_causal=False)


@case(normal(2, 3), fallback_ok=("token",))
def class_token():
    return Call(
        lambda m, x: m.head(torch.tanh(m.mix(torch.cat([m.token.expand(len(x), -1, -1), m.embed(x)], 1))))[:, 0],
        token=weight(1, 1, 3),
        embed=nn.Linear(3, 3),
        mix=nn.Conv1d(3, 2, 3),
        head=nn.Linear(1, 2),
    )


@case(normal(3, 3), n=3, fallback_ok=True)
def class_token_by_repeat():
    return Call(
        lambda m, x: torch.tanh(torch.cat([m.token.repeat(len(x), 1, 1), x], 1) @ m.mix).sum(1),
        token=weight(1, 3),
        mix=weight(3, 2),
    )


@case(normal(3, 4), n=3, n2=3)
def learned_positions_as_many_as_examples():
    return Call(lambda m, x: m.head(torch.tanh(x + m.position)).mean(1), position=weight(3, 4), head=nn.Linear(4, 2))


@case(normal(2, 4), fallback_ok=("position",))
def learned_positions_longer_than_the_input():
    return Call(
        lambda m, x: m.head(torch.tanh(x + m.position[:, : x.shape[1]])).mean(1),
        position=weight(1, 5, 4),
        head=nn.Linear(4, 2),
    )


@case(normal(3, 4), fallback_ok=("table",))
def relative_position_bias():
    index = torch.arange(3)[:, None] - torch.arange(3)[None] + 2
    return Call(
        lambda m, x: m.attend(x, m.table[m.index].permute(2, 0, 1)[None]),
        attend=Attention(4, 2),
        table=weight(5, 2),
        index=index,
    )


@case(normal(2, 4), fallback_ok=("queries", "project.weight", "project.bias"))
def learned_queries_pass_a_linear_first():
    """The projection of the queries sees (Q, d): no example axis, and Q = n2."""
    return Call(
        lambda m, x: F.scaled_dot_product_attention(m.project(m.queries).expand(len(x), -1, -1), m.key(x), m.value(x)),
        queries=weight(2, 4),
        project=nn.Linear(4, 4),
        key=nn.Linear(4, 4),
        value=nn.Linear(4, 2),
    )


@case(normal(3, 4), n=3, n2=3, fallback_ok=True)
def position_table_passes_an_mlp_as_many_as_examples():
    """The MLP sees (T, d) with T = n, though its rows are positions and every example uses all of them."""
    return Call(
        lambda m, x: m.head(torch.tanh(x + m.mlp(m.coordinates))).sum(1),
        coordinates=torch.randn(3, 2),
        mlp=nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4)),
        head=nn.Linear(4, 2),
    )


@case(several(normal(2, 4), normal(4)), fallback_ok=("log_temperature",))
def temperature():
    return Call(
        lambda m, keys, query: torch.einsum("ntd,nd->nt", m.key(keys), query) * m.log_temperature.exp(),
        key=nn.Linear(4, 4),
        log_temperature=weight(),
    )


@case(keywords(x=normal(3, 4), mask=padding_mask(3)))
def keyword_arguments():
    return Call(
        lambda m, x, mask: m.attend(x, x, x, key_padding_mask=mask)[0].mean(1),
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )
