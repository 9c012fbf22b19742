"""The gradient of the loss on the probe, as the weight sites have it: by parameter, and its size by example."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.capture import LookupSite, OuterSite, Site

BLOCK_ENTRIES = 2**22  # of gradients of single examples that are held at once


def gradient(sites: Sequence[Site]) -> Float[Tensor, " p"]:
    """``Σ_n ∂f_n/∂θ`` of one direction over all uses of a parameter, without the gradients of single examples."""
    total: Tensor | None = None
    for site in sites:
        if isinstance(site, OuterSite):
            flat = torch.einsum("nTgo,nTgi->goi", site.signals[:, 0], site.inputs.to(site.dtype)).reshape(1, 1, -1)
            own = site.own_axes(flat).reshape(-1)
        elif isinstance(site, LookupSite):
            signals = site.signals[:, 0].flatten(0, 1)
            table = signals.new_zeros(site.table, signals.shape[1])
            own = table.index_add_(0, site.ids.flatten(), signals).reshape(-1)
        else:
            own = site.rows()[:, 0].sum(0)
        if site.frame is not None:
            whole = own.new_zeros(math.prod(site.frame.shape))
            own = whole.index_copy_(0, site.frame.entries.to(own.device), own)
        total = own if total is None else total + own
    assert total is not None
    return total


def example_squares(sites: Sequence[Site]) -> Float64[Tensor, " n"]:
    """Squared norm of each example's part of the gradient, over all uses of a parameter.

    Of one linear use ``|Σ_T s_T ⊗ v_T|² = Σ_{TT'} (s_T·s_T')(v_T·v_T')``, the diagonal of the layer's kernel along the
    loss; so no gradient of an example is formed where that is smaller. An embedding that is the head too has two uses.
    """
    tables = [site for site in sites if isinstance(site, LookupSite)]
    products = [site for site in sites if isinstance(site, OuterSite) and _few_positions(site)]
    if len(sites) == 1 and (products or tables):
        return _of_product(products[0]) if products else _of_table(tables[0])
    if len(sites) == 2 and products and tables and _same_layout(products[0], tables[0]):
        return _of_product(products[0]) + _of_table(tables[0]) + 2 * _both(products[0], tables[0])
    return _of_rows(sites)[1]


def gradient_and_example_squares(sites: Sequence[Site]) -> tuple[Float[Tensor, " p"], Float64[Tensor, " n"]]:
    """Both at once: where the gradients of single examples are formed, their sum is the gradient."""
    if any(isinstance(site, OuterSite) and not _few_positions(site) for site in sites):
        return _of_rows(sites)
    return gradient(sites), example_squares(sites)


def _of_rows(sites: Sequence[Site]) -> tuple[Float[Tensor, " p"], Float64[Tensor, " n"]]:
    """The gradient of the whole parameter and the squares, from the gradients of single examples, some at a time."""
    n, entries = sites[0].examples, max(math.prod(s.frame.shape) if s.frame else s.entries for s in sites)
    size = max(1, BLOCK_ENTRIES // entries)
    blocks = [slice(start, start + size) for start in range(0, n, size)]
    total, squares = torch.zeros((), device=sites[0].held.device), list[Tensor]()
    for block in blocks:
        rows = [site.part(block, slice(None)).whole_rows()[:, 0] for site in sites]
        whole = rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
        total = total + whole.sum(0)
        squares.append(whole.double().square().sum(1))
    return total, torch.cat(squares)


def _few_positions(site: OuterSite) -> bool:
    return site.positions * (site.fan_in + site.fan_out) <= site.fan_in * site.fan_out or site.positions == 1


def _of_product(site: OuterSite) -> Float64[Tensor, " n"]:
    s, v = site.signals[:, 0], site.inputs.to(site.dtype)
    products = torch.einsum("nTgo,nUgo->ngTU", s, s) * torch.einsum("nTgi,nUgi->ngTU", v, v)
    return products.double().sum((1, 2, 3))


def _of_table(site: LookupSite) -> Float64[Tensor, " n"]:
    s, ids = site.signals[:, 0], site.ids
    return (torch.einsum("nTo,nUo->nTU", s, s) * (ids[:, :, None] == ids[:, None])).double().sum((1, 2))


def _same_layout(product: OuterSite, table: LookupSite) -> bool:
    """Whether row c of the matrix is entry c of the table."""
    plain = product.frame is None and table.frame is None and product.groups == 1
    in_order = product.order == tuple(range(len(product.order)))
    return plain and in_order and product.fan_out == table.table


def _both(product: OuterSite, table: LookupSite) -> Float64[Tensor, " n"]:
    """``Σ_{TU} s_T[id_U] (v_T · σ_U)``: the inner product of the two uses."""
    s, v = product.signals[:, 0, :, 0], product.inputs.to(product.dtype)[:, :, 0]
    rows = s.gather(2, table.ids[:, None].expand(-1, s.shape[1], -1))
    return (rows * torch.einsum("nTi,nUi->nTU", v, table.signals[:, 0])).double().sum((1, 2))
