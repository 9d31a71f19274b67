"""The embedder: plan, encode, assemble, each callable and timed on its own.

Promises: ``apply`` raises on a failure and ``apply_result`` can set the failing requests aside; either way
every item is left usable: encoded with its feature dropped, or as it was, so that a call can be tried again. One
embedder may be called from any thread: it encodes for one call at a time.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch

from mmgraph.assembling import DeepstackRows, PreparedBatch, assemble, check_kept, lay_out
from mmgraph.counters import CallTotals, EmbedCounters
from mmgraph.embed_result import EmbedResult
from mmgraph.embedding_phases import encode_plan
from mmgraph.encoder_spec import Encoders, EncoderSpec, settled_specs
from mmgraph.errors import MultimodalError, OptionError
from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.isolation import blanked, outside_errors, plan_without_failures
from mmgraph.planning import EncodePlan, build_plan
from mmgraph.pool import EncoderPool
from mmgraph.prefetch import Prefetcher
from mmgraph.ranges import RangeKind, checked_kind
from mmgraph.row_cache import RowCache
from mmgraph.row_home import RowHome
from mmgraph.staging import FeatureMover
from mmgraph.text_rows import TextEmbedding, TextRows, check_input_ids
from mmgraph.timing import EmbedTiming, PhaseRecorder

__all__ = ["DeepstackRows", "EmbedResult", "EncoderSpec", "MultimodalEmbedder", "VisionEmbedder"]

_log = logging.getLogger(__name__)


class MultimodalEmbedder:
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

    def __init__(
        self,
        *,
        strict: bool = False,
        timing: bool = False,
        ranges: RangeKind | None = None,
        pinned_bytes: int = 64 << 20,
        prefetch_bytes: int = 1 << 30,
        pool: EncoderPool | RowCache | None = None,
        keep_features: bool = False,
    ) -> None:
        self.strict = strict
        self.timing = timing
        self.last_timing: EmbedTiming | None = None
        self._options = {
            "ranges": checked_kind(ranges),
            "pinned_bytes": pinned_bytes,
            "prefetch_bytes": prefetch_bytes,
            "pool": pool,
            "keep_features": keep_features,
        }
        self._ranges = ranges
        self._mover = FeatureMover(buffer_bytes=pinned_bytes)
        self._home = RowHome(pool, keep_features, self._mover)
        self._features = Prefetcher(self._mover, prefetch_bytes, self._home.stored)
        self._totals = CallTotals()
        self._encoding = threading.RLock()  # an encoder may call the embedder

    def __getstate__(self) -> dict[str, Any]:
        return {"strict": self.strict, "timing": self.timing, **self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MultimodalEmbedder.__init__(self, **state)

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
            _count_plan(recorder, plan)
            return EmbedResult(embeds, kwargs, failed)
        finally:
            if not keeping:
                keeper.release()
            self._totals.add(self._keep_timing(recorder), calls=1, isolated=len(failed))

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
        _count_plan(recorder, plan)
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
            _count_plan(recorder, plan)
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
            _count_plan(recorder, plan)
            deep_map = None if layouts.deep is None else layouts.deep.row_map
            prepared = PreparedBatch(layouts.main.row_map, deep_map, failed, keeper.release)
            return prepared
        finally:
            if prepared is None:
                keeper.release()
            self._totals.add(self._keep_timing(recorder), calls=1, isolated=len(failed))

    def prefetch(
        self,
        batch: MultimodalForwardContext | EncodePlan,
        encoders: Encoders | None = None,
        *,
        device: torch.device | str,
    ) -> int:
        """Begin to copy the features that a batch to come will have to encode, while another is computed.

        Handles and arrays are read now, and the copies go on the side stream; whichever batch an item comes in uses
        its copies, if its feature is still the same and unchanged, else it is copied anew. Changes are seen by torch's
        version counter, so not those made past torch, such as through an array, nor those of a tensor that was made
        in inference mode. Copies of an item that never comes go with the item. May be called from any thread.

        Args:
            batch: What is to come, or its plan. Its lengths say which items it touches; its rows need not be there.
            encoders: As in `apply`; only their ``device`` is read.
            device: Where features go, unless an encoder's spec says otherwise. Only on CUDA is there anything to do.

        Returns:
            How many items' copies were begun. An item or request for which that fails is left as it was, and its
            error comes when it is embedded.

        Raises:
            MultimodalError: What was given is no batch, or its lists don't fit each other.
        """
        with PhaseRecorder(False, lambda: None, self._ranges).phase("prefetch"):
            return self._features.prefetch_batch(batch, settled_specs(encoders), torch.device(device))

    def has_rows(self, item: MultimodalDataItem) -> bool:
        """Tell whether an item's rows are there now, on it or in the pool: ``cached`` for `mmgraph.fit_to_budget`."""
        return self._home.stored(item)

    def forget(self, inputs: MultimodalInputs | None) -> None:
        """Let the rows of a request that is given up be evicted, which later chunks of it would need.

        A request whose items are gone needs no call.

        Args:
            inputs: The request's media.
        """
        items = () if inputs is None else inputs.mm_items
        self._home.unfinished.forget(item for item in items if item is not None)

    def counters(self) -> EmbedCounters:
        """Give what was done since the embedder was made; always counted, from all threads together."""
        return self._totals.reading(self._features.counts, self._mover.waits)

    def _text_rows(self, input_ids: torch.Tensor, embedding: TextEmbedding) -> TextRows:
        return TextRows(input_ids, embedding, strict=self.strict)

    def _recorder(self, device: torch.device) -> PhaseRecorder:
        on_cuda = self.timing and device.type == "cuda"
        synchronize: Callable[[], None] = (
            (lambda: torch.cuda.synchronize(device)) if on_cuda else (lambda: None)
        )
        return PhaseRecorder(self.timing, synchronize, self._ranges)

    def _keep_timing(self, recorder: PhaseRecorder) -> EmbedTiming:
        timing = recorder.result()
        if recorder.enabled:
            self.last_timing = timing
            _log.info("%s", timing.line())
        return timing


VisionEmbedder = MultimodalEmbedder


def _count_plan(recorder: PhaseRecorder, plan: EncodePlan) -> None:
    recorder.count(ranges=len(plan.scatter_ranges))
    if recorder.enabled:
        recorder.count(rows=int((plan.dst_end - plan.dst_start + 1).sum()))
