"""The look-up of text rows.

Promises: ids are clamped into the vocabulary for the look-up only, and rows that an item covers are never looked
up; an embedding that does more than look up is called as the module it is; an embedding that can't give rows is
refused before anything is encoded.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules import module as _module_globals

from mmgraph.errors import LookupInputError
from mmgraph.ops import assemble_embeddings
from mmgraph.planning import EncodePlan
from mmgraph.rows import described
from mmgraph.staging import upload

TextEmbedding = torch.nn.Module | torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


def check_input_ids(input_ids: Any, *, least: int = 0) -> None:
    """Check that ids are flat integers, and enough.

    Args:
        input_ids: The ids.
        least: How many a plan needs.

    Raises:
        LookupInputError: They aren't.
    """
    if (
        not isinstance(input_ids, torch.Tensor)
        or input_ids.dim() != 1
        or input_ids.dtype not in (torch.int32, torch.int64)
    ):
        raise LookupInputError(
            "input_ids must be an int32 or int64 tensor of one dimension, got "
            f"{described(input_ids)}; flatten the batch's rows"
        )
    if input_ids.shape[0] < least:
        raise LookupInputError(
            f"input_ids must have the rows that the plan was made for, at least {least}, got {input_ids.shape[0]}; "
            "give the batch's ids, or plan again for these"
        )


def plain_table(embedding: TextEmbedding) -> torch.Tensor | None:
    """Give the table of an embedding that only looks up, or None for one that has to be called.

    A look-up is more than that where forward is overridden or hooked, weights are parametrized, quantised or
    distributed, looked-up rows are renormalised, or the gradient is not the plain one.
    """
    if isinstance(embedding, torch.Tensor):
        return embedding
    if type(embedding) is not torch.nn.Embedding:
        return None
    weight = embedding.weight
    hooks = (
        embedding._forward_hooks,
        embedding._forward_pre_hooks,
        embedding._backward_hooks,
        embedding._backward_pre_hooks,
        _module_globals._global_forward_hooks,
        _module_globals._global_forward_pre_hooks,
        _module_globals._global_backward_hooks,
        _module_globals._global_backward_pre_hooks,
    )
    if any(hooks) or "forward" in vars(embedding) or embedding.max_norm is not None:
        return None
    if type(weight) not in (torch.nn.Parameter, torch.Tensor) or not weight.is_floating_point():
        return None
    special_gradient = embedding.padding_idx is not None or embedding.scale_grad_by_freq or embedding.sparse
    if special_gradient and weight.requires_grad and torch.is_grad_enabled():
        return None
    return weight


class TextRows:
    """The look-up of the rows that no item covers.

    Args:
        input_ids: int32 or int64 ``[T]``.
        embedding: The text embedding.
        strict: Ids outside the vocabulary at uncovered rows are errors.

    Raises:
        LookupInputError: The embedding isn't a module, a table of floating-point rows, or a function.
    """

    def __init__(self, input_ids: torch.Tensor, embedding: TextEmbedding, *, strict: bool) -> None:
        self.input_ids = input_ids
        self.embedding = embedding
        self.strict = strict
        self.table = plain_table(embedding)
        self._called: tuple[EncodePlan, torch.Tensor, npt.NDArray[np.int32]] | None = None
        if self.table is None and not callable(embedding):
            raise LookupInputError(
                f"the text embedding must be a module, a table or a function, got {type(embedding).__name__}"
            )
        if self.table is not None and (self.table.dim() != 2 or not self.table.is_floating_point()):
            raise LookupInputError(
                "the text embedding's table must hold floating-point rows [vocabulary, width], got "
                f"{described(self.table)}; give the table itself, or a module that makes such rows"
            )

    @property
    def vocabulary(self) -> int | None:
        """How many ids the embedding knows, where something tells."""
        if self.table is not None:
            return self.table.shape[0]
        size = getattr(self.embedding, "num_embeddings", None)
        if isinstance(size, int):
            return size
        weight = getattr(self.embedding, "weight", None)
        return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None

    def outside(self, plan: EncodePlan) -> npt.NDArray[np.int64]:
        """Find the text rows whose ids are outside the vocabulary, where that is an error and the host can tell.

        Returns:
            Rows of ``input_ids``, ascending; none unless strict, on a device, or where nothing tells the
            vocabulary's size. On a device the look-up records them.
        """
        size = self.vocabulary
        if not self.strict or size is None or self.input_ids.device.type != "cpu":
            return np.empty(0, dtype=np.int64)
        ids = self.input_ids.numpy()
        return np.flatnonzero(((ids < 0) | (ids >= size)) & self._is_text(plan))

    def width(self, plan: EncodePlan) -> int:
        """Give the embedding's width; calls the embedding where only its output tells.

        Raises:
            LookupInputError: The embedding doesn't give one row for each id.
        """
        rows = self._rows_of(plan)[0] if self.table is None else self.table
        return rows.shape[-1]

    def source(self, plan: EncodePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Give ids and a table whose look-up gives the text rows.

        Returns:
            The ids as they came and the embedding's table; or, for an embedding that was called, each row's
            place among the rows that the call gave, and those rows.

        Raises:
            LookupInputError: The embedding doesn't give one row for each id.
        """
        if self.table is not None:
            return self.input_ids, self.table
        rows, places = self._rows_of(plan)
        return upload(places, rows.device), rows

    def _is_text(self, plan: EncodePlan) -> npt.NDArray[np.bool_]:
        total = self.input_ids.shape[0]
        change = np.zeros(total + 1, dtype=np.int32)  # a plan's ranges are disjoint, so no index repeats
        change[plan.dst_start] += 1
        change[plan.dst_end + 1] -= 1
        is_text: npt.NDArray[np.bool_] = np.cumsum(change[:total]) == 0
        return is_text

    def _rows_of(self, plan: EncodePlan) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        if self._called is None or self._called[0] is not plan:
            is_text = self._is_text(plan)
            rows = self._call(is_text)
            self._called = plan, rows, np.cumsum(is_text, dtype=np.int32) - is_text
        return self._called[1], self._called[2]

    def _call(self, is_text: npt.NDArray[np.bool_]) -> torch.Tensor:
        size = self.vocabulary
        if self.strict and size is not None and self.input_ids.device.type != "cpu":
            self._record_outside(is_text, size)
        ids = self.input_ids[upload(np.flatnonzero(is_text), self.input_ids.device)]
        call = cast(Callable[[torch.Tensor], Any], self.embedding)
        rows = call(ids.clamp(min=0) if size is None else ids.clamp(0, max(size - 1, 0)))
        if (
            not isinstance(rows, torch.Tensor)
            or rows.dim() != 2
            or rows.shape[0] != ids.shape[0]
            or not rows.is_floating_point()
        ):
            raise LookupInputError(
                f"the text embedding must give floating-point rows [{ids.shape[0]}, width] for {ids.shape[0]} ids, "
                f"got {described(rows)}"
            )
        return rows

    def _record_outside(self, is_text: npt.NDArray[np.bool_], size: int) -> None:
        """Let the op itself check the batch's rows, by a look-up in a table of one column."""
        table = torch.zeros(size, 1, device=self.input_ids.device)
        covered = upload(np.where(is_text, -1, 0).astype(np.int32), table.device)
        assemble_embeddings(self.input_ids, table, table.new_zeros(1, 1), covered, strict=True)
