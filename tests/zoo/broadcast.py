"""Parameters that are broadcast over the examples before they meet data, and layouts that look like a batch."""

import torch
from torch import nn

from zoo.case import Call, ids, normal, registry, weight

CASES, case = registry()


@case(normal(5, 4), n=4, fallback_ok=True)
def learned_query_expanded_into_attention():
    """The attention-pooling head of SigLIP and of many others."""
    return Call(
        lambda m, x: m.head(m.attend(m.query.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0]),
        query=weight(1, 1, 4), attend=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2),
    )  # fmt: skip


@case(normal(5, 4), n=4, fallback_ok=True)
def learned_queries_repeated_into_attention():
    return Call(
        lambda m, x: m.attend(m.query.repeat(len(x), 1, 1), x, x, need_weights=False)[0],
        query=weight(1, 3, 4), attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )  # fmt: skip


@case(normal(5, 4), n=4, fallback_ok=True)
def learned_query_length_first():
    return Call(
        lambda m, x: m.attend(m.query.expand(-1, len(x), -1), x.mT.movedim(1, 2).transpose(0, 1), x.transpose(0, 1))[
            0
        ].transpose(0, 1),
        query=weight(2, 1, 4), attend=nn.MultiheadAttention(4, 2),
    )  # fmt: skip


@case(normal(5, 4), n=4, fallback_ok=True)
def learned_query_stacked_example_by_example():
    return Call(
        lambda m, x: m.attend(torch.stack([m.query for _ in x]), x, x, need_weights=False)[0],
        query=weight(2, 4), attend=nn.MultiheadAttention(4, 2, batch_first=True),
    )  # fmt: skip


@case(normal(6, 4), n=4)
def table_repeated_along_each_axis():
    """Whole copies for each example, along both axes of the table, and with an axis more."""

    def run(m, x):
        n = len(x)
        tables = m.table.repeat(3 * n, 2).unflatten(0, (n, 6))
        copies = m.table.repeat(n, 3, 1, 2).flatten(1, 2)
        return torch.tanh(x * tables + copies).sum(1)

    return Call(run, table=weight(2, 2))


@case(normal(2, 3), n=4)
def table_of_which_each_example_has_a_part():
    """Copies that are no whole ones for an example: two of its four rows each."""

    def run(m, x):
        n = len(x)
        parts = m.table.repeat(-(-n // 2), 1)[: 2 * n]
        return torch.tanh(x * parts.unflatten(0, (n, 2))).sum(1)

    return Call(run, table=weight(4, 3))


@case(normal(4, 4), n=4, fallback_ok=True)
def relative_positions_repeated_over_batch_and_heads():
    """DeBERTa's: a table passes a projection, is repeated for every example and head, then meets the queries."""

    def run(m, x):
        n, length, _ = x.shape
        q = m.q(x).unflatten(2, (2, 2)).permute(0, 2, 1, 3).reshape(n * 2, length, 2)
        keys = m.k(m.table).unflatten(1, (2, 2)).permute(1, 0, 2).repeat(n, 1, 1)
        scores = (q @ keys.transpose(1, 2)).softmax(-1)
        return (scores @ m.v(x).unflatten(2, (2, 2)).permute(0, 2, 1, 3).reshape(n * 2, length, 2)).reshape(n, -1)

    return Call(run, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4), table=weight(4, 4))


@case(normal(4, 4), n=4, fallback_ok=True)
def relative_bias_gathered_by_distance():
    """T5's and Swin's: a table looked up once, laid out by head and added to the scores of every example."""

    def run(m, x):
        length = x.shape[1]
        distance = torch.arange(length)[:, None] - torch.arange(length)[None] + length - 1
        scores = x @ m.w @ x.transpose(1, 2) + m.table[distance].permute(2, 0, 1)[0]
        return (scores.softmax(-1) @ x).flatten(1)

    return Call(run, w=weight(4, 4), table=weight(7, 1))


@case(ids(7, 5), n=4, fallback_ok=True)
def token_types_looked_up_once():
    """BERT's: one row of ids for all examples, looked up and broadcast."""
    return Call(
        lambda m, i: m.head((m.word(i) + m.position(torch.arange(5)[None]) + m.kind(torch.zeros(1, 5).long())).tanh()),
        word=nn.Embedding(7, 4), position=nn.Embedding(5, 4), kind=nn.Embedding(2, 4), head=nn.Linear(4, 2),
    )  # fmt: skip


@case(normal(9, 3), n=3, fallback_ok=True)
def graph_attention_one_graph_at_a_time():
    """A loop over examples whose inner axis (9 nodes) is a multiple of their number."""

    def one(m, h):
        h = m.w(h)
        a = torch.cat([h[:, None].expand(-1, 9, -1), h[None].expand(9, -1, -1)], -1)
        return (m.a(a)[..., 0].softmax(-1) @ h).mean(0)

    return Call(lambda m, x: torch.stack([one(m, h) for h in x]), w=nn.Linear(3, 4), a=nn.Linear(8, 1))


@case(normal(4), n=4, fallback_ok=True)
def expanded_prefix_before_the_data():
    """Prefix tuning: learned tokens before the example's own."""
    return Call(
        lambda m, x: m.head(m.mix(torch.cat([m.prefix.expand(len(x), -1, -1), m.embed(x)[:, None]], 1)).tanh().mean(1)),
        prefix=weight(1, 3, 4), embed=nn.Linear(4, 4), mix=nn.Linear(4, 4), head=nn.Linear(4, 2),
    )  # fmt: skip
