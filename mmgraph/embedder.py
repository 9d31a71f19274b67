"""The embedder: plan, encode, assemble, each callable and timed on its own.

Promises: ``apply`` raises on a failure and ``apply_result`` can set the failing requests aside; either way
every item is left usable: encoded with its feature dropped, or as it was, so that a call can be tried again. One
embedder may be called from any thread: it encodes for one call at a time.
"""

from typing import Any, Literal

import torch

from mmgraph.assembling import DeepstackRows, assemble
from mmgraph.embed_result import EmbedResult
from mmgraph.embedder_phases import PhasedEmbedder, count_plan
from mmgraph.encode_phase import encode_plan
from mmgraph.encoder_spec import Encoders, EncoderSpec, settled_specs
from mmgraph.errors import MultimodalError, OptionError
from mmgraph.inputs import MultimodalForwardContext
from mmgraph.isolation import blanked, outside_errors, plan_without_failures
from mmgraph.text_rows import TextEmbedding, check_input_ids

__all__ = ["DeepstackRows", "EmbedResult", "EncoderSpec", "MultimodalEmbedder", "VisionEmbedder"]


class MultimodalEmbedder(PhasedEmbedder):
    """Turns a flat batch with media into the language model's input embeddings.

    Threads may share one embedder, and items between its calls. Items that are shared between embedders, or rows
    that are encoded on one CUDA stream and used on another, need the caller's own ordering.

    Args:
        strict: Text ids outside the vocabulary are errors: on a CPU at once, on a device in the flag that
            ``mmgraph.ops.check_errors`` reads. Otherwise the nearest row is taken.
        timing: Measure each call, keep the figures in ``last_timing`` and log them; synchronises the device.
        ranges: Marks phases as ``mmgraph.embed.<phase>``: "profiler" by `torch.profiler.record_function`, "nvtx" by
            NVTX ranges; None: by ``record_function`` while torch's profiler is on.
        pinned_bytes: The bound of each of the two pinned buffers that a CUDA device has, a power of two.
        prefetch_bytes: The most bytes of device memory that `prefetch` fills ahead.
        pool: Keeps rows by modality and hash across requests and chunks, in place of the items: an `EncoderPool`, on
            the device of ``input_ids``, or a `RowCache`. One for each model.
        keep_features: Items whose rows are in a pool keep their features, to be encoded again once they are evicted.

    Raises:
        OptionError: One of these is none of its choices.

    Attributes:
        last_timing: The figures of the last call that was measured, or None.
    """

    def apply(
        self,
        input_ids: torch.Tensor,
        text_embedding: TextEmbedding,
        ctx: MultimodalForwardContext | None,
        encoders: Encoders | None,
        multimodal_model: Any = None,
        is_decode_or_idle: bool = False,
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Embed a batch.

        Args:
            input_ids: int32 or int64 ``[T]``: the chunks of the prefill requests in order, then decode rows.
                Ids at items' positions may be anything.
            text_embedding: A module, called as it is where it does more than look up; a table; or a function.
                The vocabulary's size is its ``num_embeddings``, else the rows of its ``weight``, so a shard must tell
                the former.
            ctx: The batch's media; None for text only.
            encoders: An `EncoderSpec`, or a function of a list of items, by modality.
            multimodal_model: For deepstack, has ``separate_deepstack_embeds`` and ``deepstack_visual_indexes``.
            is_decode_or_idle: The batch has no prefill request.

        Returns:
            Embeddings ``[T, hidden]`` in the embedding's dtype, and keywords for the language model:
            ``input_deepstack_embeds`` ``[T, hidden * levels]``, or ``deepstack_rows``, a
            `DeepstackRows`, where an encoder with deepstack takes part. ``(None, {})`` where no item is
            touched.

        Raises:
            MultimodalError: One of its subclasses says what was wrong; its ``request`` says whose, where it is
                one's.
        """
        result = self.apply_result(
            input_ids, text_embedding, ctx, encoders, multimodal_model, is_decode_or_idle
        )
        return result.embeds, result.kwargs

    def apply_result(
        self,
        input_ids: torch.Tensor,
        text_embedding: TextEmbedding,
        ctx: MultimodalForwardContext | None,
        encoders: Encoders | None,
        multimodal_model: Any = None,
        is_decode_or_idle: bool = False,
        *,
        on_error: Literal["raise", "isolate"] = "raise",
    ) -> EmbedResult:
        """Embed a batch, and set failing requests aside where asked.

        Args:
            input_ids: As in `apply`.
            text_embedding: As in `apply`.
            ctx: As in `apply`.
            encoders: As in `apply`.
            multimodal_model: As in `apply`.
            is_decode_or_idle: As in `apply`.
            on_error: "isolate": a request whose items can't be planned, encoded or used is named in ``failed``
                and the others are embedded; where an encoder fails on a batch, it is called again for each
                item, to find which. Errors of the batch as a whole are raised all the same.

        Returns:
            Embeddings, keywords and the failed requests.

        Raises:
            MultimodalError: As in `apply`.
        """
        if on_error not in ("raise", "isolate"):
            raise OptionError(f"on_error must be 'raise' or 'isolate', got {on_error!r}")
        if is_decode_or_idle or ctx is None:
            return EmbedResult(None)
        check_input_ids(input_ids)
        self._home.check(input_ids.device)
        recorder = self._recorder(input_ids.device)
        isolate = on_error == "isolate"
        failed: dict[int, MultimodalError] = {}
        keeper = self._home.keeper()
        keeping = False
        try:
            with recorder.phase("plan"):
                plan = plan_without_failures(ctx, input_ids.shape[0], failed if isolate else None)
            if not plan:
                return EmbedResult(None, {}, failed)
            specs = settled_specs(encoders)
            text = self._text_rows(blanked(input_ids, ctx, failed), text_embedding)
            outside = outside_errors(text, plan, ctx)
            if outside:
                if not isolate:
                    raise outside[0]
                failed |= {error.request: error for error in outside if error.request is not None}
                plan = plan.without_requests(failed)
                if not plan:
                    return EmbedResult(None, {}, failed)
                text = self._text_rows(blanked(input_ids, ctx, failed), text_embedding)
            with recorder.phase("assemble"):
                width = text.width(plan)
            device = input_ids.device
            with self._encoding:
                failures = encode_plan(
                    plan,
                    specs,
                    multimodal_model,
                    width,
                    device,
                    self._features,
                    keeper,
                    recorder,
                    isolate=isolate,
                )
            if failures:
                for item, error in failures.items():
                    failed.update(dict.fromkeys(plan.requests_of(item), error))
                plan = plan.without_requests(failed)
                if not plan:
                    return EmbedResult(None, {}, failed)
                text = self._text_rows(blanked(input_ids, ctx, failed), text_embedding)
            with recorder.phase("assemble"):
                self._home.settled(plan, keeper)
                embeds, kwargs = assemble(plan, text, specs, multimodal_model, keeper, self._mover)
            keeping = True
            count_plan(recorder, plan)
            return EmbedResult(embeds, kwargs, failed)
        finally:
            if not keeping:
                keeper.release()
            self._totals.add(self._keep_timing(recorder), calls=1, isolated=len(failed))


VisionEmbedder = MultimodalEmbedder
