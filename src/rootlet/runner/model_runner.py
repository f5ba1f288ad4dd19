"""`ModelRunner`: one plan -> one forward -> one result. It owns the order of things in a step and nothing else.

    row inits -> sampler      tokens -> ForwardBatch      rows that draw -> sampler      tables, work list -> attention
    model (graph replay, or eager) -> logits of the rows that draw -> sampler      tokens -> RowResults      prompt logprobs

Everything above the line "model" is host work on preallocated numpy; the model is one native call under a graph. Called by `LocalExecutor`,
in plan order, on one thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from rootlet.attention.base import AttentionBackend
from rootlet.core.step import Capacity, RowResult, StepPlan, StepResult
from rootlet.device.base import Graph
from rootlet.layers.forward_context import ForwardContext, forward_context
from rootlet.models.causal_lm import CausalLM
from rootlet.runner.forward_batch import ForwardBatch
from rootlet.runner.graphs import StepGraph
from rootlet.runner.prompt_logprobs import PromptLogprobs
from rootlet.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`hidden` [>= T, hidden] before the final norm, `logits` [>= R, V] (the sampler may have edited them). Valid until the next step."""

    hidden: Tensor
    logits: Tensor


class ModelRunner:
    __slots__ = ("_context", "attention", "batch", "capacity", "graph", "last", "model", "prompt_logprobs", "sampler")

    def __init__(self, model: CausalLM, attention: AttentionBackend, sampler: Sampler, *, capacity: Capacity, native: bool) -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.capacity = capacity
        self.batch = ForwardBatch(capacity)
        self.prompt_logprobs = PromptLogprobs(model.logits, native=native)
        self.graph: StepGraph[StepOutput] | None = None
        self.last: StepOutput | None = None
        self._context = ForwardContext(attention)

    def capture(self, graph: Graph) -> None:
        """Records a step at the largest size in the empty `graph`; from now on steps are replayed."""
        self.graph = StepGraph(graph, self._forward_all)

    def close(self) -> None:
        """Gives the recording back. Idempotent; nothing can be run afterwards."""
        if self.graph is not None:
            self.graph.free()
        self.graph = self.last = None

    def run(self, plan: StepPlan) -> StepResult:
        """Executes the plan. A row without finite logits fails alone."""
        start = time.perf_counter()
        assert plan.num_tokens <= self.capacity.max_step_tokens, f"{plan.num_tokens} tokens in a plan, at most {self.capacity.max_step_tokens}"
        assert plan.num_rows <= self.capacity.max_rows, f"{plan.num_rows} rows in a plan, at most {self.capacity.max_rows}"
        for init in plan.row_inits:
            self.sampler.init_row(init)
            self.prompt_logprobs.init_row(init)
        self.batch.fill(plan, self.sampler)
        self.sampler.prepare(plan)
        self.attention.plan(plan)
        rows: list[RowResult] = []
        if plan.num_tokens:
            self.last = self.graph.replay(self.batch) if self.graph is not None else self._forward_step()
            rows = self.sampler.collect(plan)
            self.prompt_logprobs.add(plan, self.last.hidden, rows)
        return StepResult(plan.step, tuple(rows), time.perf_counter() - start)

    def _forward_step(self) -> StepOutput:
        batch = self.batch
        return self._forward(batch.input_ids[: batch.num_tokens], batch.positions[: batch.num_tokens], batch.logit_rows[: batch.num_logit_rows])

    def _forward_all(self) -> StepOutput:
        return self._forward(self.batch.input_ids, self.batch.positions, self.batch.logit_rows)

    def _forward(self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> StepOutput:
        with forward_context(self._context):
            self.attention.prep()
            hidden = self.model.forward(input_ids, positions)
            logits = self.model.logits(hidden, logit_rows)
            self.sampler.sample(logits)
        return StepOutput(hidden, logits)
