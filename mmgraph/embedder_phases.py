"""The embedder's phases, each callable alone: plan, encode, assemble; and both first ones for a captured prefill.

Promises: a plan holds its rows in a pool from its first phase to its assembly; a phase that fails can be called again.
"""

from typing import Any, Literal

import torch

from mmgraph.assembling import PreparedBatch, assemble, check_kept, lay_out
from mmgraph.embedder_base import EmbedderBase
from mmgraph.encode_phase import encode_plan
from mmgraph.encoder_spec import Encoders, settled_specs
from mmgraph.errors import MultimodalError, OptionError
from mmgraph.inputs import MultimodalForwardContext
from mmgraph.isolation import outside_errors, plan_without_failures
from mmgraph.planning import EncodePlan, build_plan
from mmgraph.pool import EncoderPool
from mmgraph.text_rows import TextEmbedding, check_input_ids
from mmgraph.timing import PhaseRecorder


class PhasedEmbedder(EmbedderBase):
    """The phases of a `mmgraph.MultimodalEmbedder`."""

    def plan(self, ctx: MultimodalForwardContext, num_tokens: int) -> EncodePlan:
        """Plan a batch: the first phase alone; see `mmgraph.planning.build_plan`.

        Args:
            ctx: The batch.
            num_tokens: Rows of ``input_ids``.

        Returns:
            The plan; see `mmgraph.budget.limit_plan` to encode it within a budget.

        Raises:
            MultimodalError: Lengths, offsets or aliases are wrong.
        """
        recorder = self._recorder(torch.device("cpu"))
        with recorder.phase("plan"):
            plan = build_plan(ctx, num_tokens)
            self._home.keeper_of(plan).find(plan)
        count_plan(recorder, plan)
        self._keep_timing(recorder)
        return plan

    def encode(
        self,
        plan: EncodePlan,
        encoders: Encoders | None,
        multimodal_model: Any = None,
        *,
        device: torch.device | str,
        width: int | None = None,
    ) -> None:
        """Encode a plan's misses, give aliases their rows and drop what is used up: the second phase alone.

        Args:
            plan: The plan.
            encoders: As in `apply`.
            multimodal_model: As in `apply`.
            device: Where features go, unless an encoder's spec says otherwise.
            width: The text embedding's width; None leaves that check to `assemble`, where rows are not in a pool.

        Raises:
            MultimodalError: An encoder or a feature is missing, or an encoder failed. Items are encoded or as
                before.
        """
        target = torch.device(device)
        if width is None and self._home.store is not None:
            raise OptionError("encode needs the text embedding's width where rows are kept in a pool")
        recorder = self._recorder(target)
        try:
            specs = settled_specs(encoders)
            with self._encoding:
                encode_plan(
                    plan,
                    specs,
                    multimodal_model,
                    width,
                    target,
                    self._features,
                    self._home.keeper_of(plan),
                    recorder,
                    isolate=False,
                )
        finally:
            self._totals.add(self._keep_timing(recorder))

    def assemble(
        self,
        plan: EncodePlan,
        input_ids: torch.Tensor,
        text_embedding: TextEmbedding,
        encoders: Encoders | None,
        multimodal_model: Any = None,
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Assemble the embeddings of a plan whose items are encoded: the third phase alone.

        Args:
            plan: The plan.
            input_ids: As in `apply`.
            text_embedding: As in `apply`.
            encoders: As in `apply`; only what they say of deepstack is read.
            multimodal_model: As in `apply`.

        Returns:
            As `apply`.

        Raises:
            MultimodalError: An item isn't encoded or its rows don't fit.
        """
        if not plan:
            return None, {}
        check_input_ids(input_ids, least=int(plan.dst_end.max()) + 1)
        recorder = self._recorder(input_ids.device)
        self._home.check(input_ids.device)
        keeper = self._home.take(plan)
        assembled = False
        try:
            with recorder.phase("assemble"):
                text = self._text_rows(input_ids, text_embedding)
                for error in outside_errors(text, plan, None):
                    raise error
                specs = settled_specs(encoders)
                for failure in keeper.open(plan, specs, multimodal_model, text.width(plan)).values():
                    raise failure
                check_kept(plan, text.width(plan), specs, multimodal_model, keeper)
                self._home.settled(plan, keeper)
                result = assemble(plan, text, specs, multimodal_model, keeper, self._mover)
                assembled = True
            count_plan(recorder, plan)
        finally:
            if not assembled:
                self._home.put_back(plan, keeper)
            self._totals.add(self._keep_timing(recorder), calls=1)
        return result

    def prepare(
        self,
        ctx: MultimodalForwardContext,
        num_tokens: int,
        encoders: Encoders | None,
        multimodal_model: Any = None,
        *,
        width: int,
        on_error: Literal["raise", "isolate"] = "raise",
    ) -> PreparedBatch:
        """Plan and encode a batch whose embeddings are assembled elsewhere: inside a captured prefill.

        Its graph reads the pool, ids and a map, or its ranges, which are copied to the graph's inputs before each
        replay; see ``mmgraph.ops.expand_ranges``, ``assemble_embeddings`` and ``deepstack_add``.

        Args:
            ctx: The batch.
            num_tokens: Rows of ``input_ids``.
            encoders: As in `apply`.
            multimodal_model: As in `apply`.
            width: The text embedding's width.
            on_error: As in `apply_result`.

        Returns:
            The maps, to be released once the replay was launched. They cover nothing where no item is touched.

        Raises:
            MultimodalError: As in `apply`; the embedder has no `EncoderPool`.
        """
        pool = self._home.store
        if not isinstance(pool, EncoderPool):
            raise OptionError("prepare needs an EncoderPool: write MultimodalEmbedder(pool=EncoderPool(...))")
        if on_error not in ("raise", "isolate"):
            raise OptionError(f"on_error must be 'raise' or 'isolate', got {on_error!r}")
        if not isinstance(width, int) or width < 1:
            raise OptionError(f"width must be the text embedding's, an integer of at least 1, got {width!r}")
        recorder = self._recorder(pool.device)
        failed: dict[int, MultimodalError] = {}
        isolate = on_error == "isolate"
        keeper = self._home.keeper()
        prepared: PreparedBatch | None = None
        try:
            with recorder.phase("plan"):
                plan = plan_without_failures(ctx, num_tokens, failed if isolate else None)
            specs = settled_specs(encoders)
            with self._encoding:
                failures = encode_plan(
                    plan,
                    specs,
                    multimodal_model,
                    width,
                    pool.device,
                    self._features,
                    keeper,
                    recorder,
                    isolate=isolate,
                )
            for item, error in failures.items():
                failed.update(dict.fromkeys(plan.requests_of(item), error))
            plan = plan.without_requests(failed) if failed else plan
            with recorder.phase("assemble"):
                self._home.settled(plan, keeper)
                layouts = lay_out(
                    plan, num_tokens, width, specs, multimodal_model, keeper, pool.device, self._mover
                )
            count_plan(recorder, plan)
            deep_map = None if layouts.deep is None else layouts.deep.row_map
            prepared = PreparedBatch(layouts.main.row_map, deep_map, failed, keeper.release)
            return prepared
        finally:
            if prepared is None:
                keeper.release()
            self._totals.add(self._keep_timing(recorder), calls=1, isolated=len(failed))


def count_plan(recorder: PhaseRecorder, plan: EncodePlan) -> None:
    """Count a plan's ranges, and where times are measured its rows."""
    recorder.count(ranges=len(plan.scatter_ranges))
    if recorder.enabled:
        recorder.count(rows=int((plan.dst_end - plan.dst_start + 1).sum()))
