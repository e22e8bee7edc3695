"""Where each row goes on the expert rank, and the fixed-order sum that undoes it.

These few functions are the whole layout contract in plain PyTorch: zones per local expert, padded and bounded; rows in
arrival order inside a zone; float32 sums in ascending expert id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ncclep.ep.options import EPOptions


@dataclass(frozen=True, eq=False)
class Zones:
    """The contiguous range of output rows of each local expert.

    ``starts``, ``sizes`` (pad rows included) and ``valid`` (rows with a token) are ``[L]`` int64 on one device.
    """

    num_rows: int
    starts: Tensor
    sizes: Tensor
    valid: Tensor
    dropped: Tensor

    @classmethod
    def from_counts(cls, counts: Tensor, options: EPOptions) -> Zones:
        """Lay out ``counts`` ``[L]`` int64 routed pairs per local expert.

        Reads the device only for exact sizes; a budget or ``rows_per_expert`` needs no host sync.

        Example: counts ``[3, 0, 5]`` with alignment 4 gives sizes ``[4, 0, 8]``; budget 8 cuts them to ``[4, 0, 4]``
        and drops one pair.
        """
        if options.rows_per_expert is not None:
            wanted = torch.full_like(counts, options.rows_per_expert)
            num_rows = counts.numel() * options.rows_per_expert
        else:
            wanted = (counts + options.alignment - 1) // options.alignment * options.alignment
            num_rows = int(wanted.sum()) if options.budget is None else options.budget
        ends = wanted.cumsum(0).clamp(max=num_rows)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        sizes = ends - starts
        valid = torch.minimum(counts, sizes)
        return cls(num_rows, starts, sizes, valid, counts.sum() - valid.sum())


@dataclass(frozen=True, eq=False)
class Placement:
    """Index tensors between V arrived tokens and N output rows.

    ``row_of_pair`` ``[V, K]`` int64: output row of each pair, -1 for none. ``token_of_row`` ``[N]`` int64: arrived
    token of each output row, V for pad rows.
    """

    row_of_pair: Tensor
    token_of_row: Tensor

    @classmethod
    def build(cls, expert_of_pair: Tensor, counts: Tensor, zones: Zones) -> Placement:
        """Place pairs in (expert, token, column) order.

        Args:
            expert_of_pair: ``[V, K]`` int64 local expert, -1 for none.
            counts: ``[L]`` int64, pairs of each local expert.
            zones: from the same counts.
        """
        num_tokens, top_k = expert_of_pair.shape
        device, num_local = expert_of_pair.device, counts.numel()
        nothing = torch.zeros(1, dtype=torch.int64, device=device)  # a zone without rows for the pairs not meant for us
        starts = torch.cat([zones.starts.to(device), nothing])
        sizes = torch.cat([zones.sizes.to(device), nothing])
        first_of_expert = torch.cat([nothing, counts.to(device).cumsum(0)])

        expert = expert_of_pair.flatten()
        expert, order = expert.masked_fill(expert < 0, num_local).sort(stable=True)
        position = torch.arange(expert.numel(), device=device) - first_of_expert[expert]
        row = (starts[expert] + position).masked_fill(position >= sizes[expert], -1)

        row_of_pair = torch.empty_like(order).scatter_(0, order, row)
        token_of_row = torch.full((zones.num_rows + 1,), num_tokens, device=device)
        token_of_row.scatter_(0, row.masked_fill(row < 0, zones.num_rows), order // top_k)
        # The last slot collected the pairs without a row.
        return cls(row_of_pair.view(num_tokens, top_k), token_of_row[:-1])

    def spread(self, arrived: Tensor) -> Tensor:
        """Copy arrived tokens ``[V + 1, H]``, the last of which is the pad row, to their rows ``[N, H]``."""
        return arrived.index_select(0, self.token_of_row)

    def spread_probs(self, pair_probs: Tensor) -> Tensor:
        """Put one value per pair ``[V, K]`` to the rows ``[N]``; pad rows get 0."""
        num_rows = self.token_of_row.numel()
        target = self.row_of_pair.masked_fill(self.row_of_pair < 0, num_rows).flatten()
        return pair_probs.new_zeros(num_rows + 1).scatter_(0, target, pair_probs.flatten())[:-1]

    def collect_probs(self, row_probs: Tensor) -> Tensor:
        """Inverse of :meth:`spread_probs`: ``[N]`` to ``[V, K]``, 0 for pairs without a row."""
        padded = torch.cat([row_probs, row_probs.new_zeros(1)])
        return padded[self.row_of_pair]  # -1 reads the zero at the end


def sum_in_order(rows: Tensor, table: Tensor) -> Tensor:
    """Sum chosen rows per output, left to right, in float32 (float64 for float64), rounded once to the rows' dtype.

    Args:
        rows: ``[N, H]``.
        table: ``[M, C]`` int64 indices into ``rows``; -1 adds nothing.

    Returns:
        ``[M, H]``. The order of additions is that of the columns, on every device and from run to run.
    """
    total = rows.new_zeros(table.shape[0], rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    if rows.shape[0] == 0:
        return total.to(rows.dtype)
    for column in table.unbind(1):
        absent = (column < 0).unsqueeze(1)
        # masked_fill, not a product: 0 * inf would be nan
        total += rows.index_select(0, column.clamp(min=0)).to(total.dtype).masked_fill_(absent, 0)
    return total.to(rows.dtype)


def append_zero_row(x: Tensor) -> Tensor:
    """``[V, H]`` with one more row of zeros, the source of pad rows."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])
