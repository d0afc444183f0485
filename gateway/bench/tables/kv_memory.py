"""Table 6: how much of the cache's memory holds tokens, and what sharing a prompt saves. Planner and pool, no device;
the beam search alone runs the model, since what beams share depends on what it says.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.bench import load
from gateway.bench.render import Table
from gateway.bench.tables.beam import search
from gateway.bench.tables.lab import Lab, Sizes

if TYPE_CHECKING:
    from workers.protocol import Generate

Shape = tuple[int, int]
VOCAB = 30_000
STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Held:
    """Over the steps of a planner's run."""

    share: float
    """Mean part of the blocks in use that held computed tokens."""
    tokens: float
    """Mean computed tokens held."""
    running: float
    """Mean sequences under way."""
    peak: int
    """Most blocks in use."""


def run(lab: Lab, sizes: Sizes) -> list[Table]:
    """Paged against reserved; parallel samples; beams."""
    return [_paged(lab, sizes), _samples(lab, sizes), _beams(lab, sizes)]


def _paged(lab: Lab, sizes: Sizes) -> Table:
    drawn = load.burst(f"{lab.seed}/t6", sizes.memory_requests, sizes.memory_inputs, sizes.memory_outputs, VOCAB)
    given, wanted = sizes.memory_inputs, sizes.memory_outputs
    table = Table(
        f"6a. KV memory that holds tokens ({sizes.memory_requests} requests of {given[0]}–{given[1]} in / "
        f"{wanted[0]}–{wanted[1]} out, {sizes.memory_running} running)",
        ("memory", "holds tokens", "most blocks in use", "of tokens each"),
    )
    requests = [_generate(request.id, request.tokens, request.max_tokens) for request in drawn.requests]
    held: list[Held] = []
    for size in sizes.block_sizes:
        held.append(hold(requests, block_size=size, running=sizes.memory_running))
        table.add(f"paged, blocks of {size}", f"{held[-1].share:.1%}", held[-1].peak, size)
    reserved = held[0].tokens / (held[0].running * sizes.reserved)
    table.add(f"reserved, {sizes.reserved:,} per request", f"{reserved:.1%}", None, None)
    table.notes = ["Means over all steps; a prompt's blocks are taken when it is admitted, before they are filled."]
    return table


def _samples(lab: Lab, sizes: Sizes) -> Table:
    given, wanted = sizes.shared
    table = Table(
        f"6b. Parallel sampling, {given} in / {wanted} out", ("samples", "blocks shared", "blocks apart", "saved")
    )
    size = lab.target.engine.block_size
    for width in sizes.widths:
        prompt = load.prompt(f"{lab.seed}/t6b/{width}", given, VOCAB)
        together = hold([_generate("one", prompt, wanted, n=width)], block_size=size, running=width)
        single = [_generate(f"r{index}", prompt, wanted) for index in range(width)]
        apart = hold(single, block_size=size, running=width)
        table.add(str(width), together.peak, apart.peak, f"{1 - together.peak / apart.peak:.1%}")
    table.notes = ["Most blocks in use; prefix cache off, so that only sharing among the samples counts."]
    return table


def _beams(lab: Lab, sizes: Sizes) -> Table:
    given, wanted = sizes.beam
    table = Table(
        f"6c. Beam search, {given} in / {wanted} out",
        ("beams", "most blocks shared", "most blocks apart", "saved, mean", "saved at the end"),
    )
    room = lab.blocks(4 * max(sizes.widths) * (given + wanted + 64))
    for width in sizes.widths:
        with (
            lab.engine(prefix_cache=False, max_running=width, blocks=room) as engine,
            lab.display.task(f"beam search, {width} beams"),
        ):
            prompt = load.prompt(f"{lab.seed}/t6c/{width}", given, engine.vocab)
            found = search(engine, prompt, width, wanted)
        saved = [1 - shared / apart for shared, apart in zip(found.shared, found.apart, strict=True)]
        most = max(found.shared), max(found.apart)
        table.add(str(width), *most, f"{statistics.mean(saved):.1%}", f"{saved[-1]:.1%}")
    table.notes = ["Blocks in use by the engine's own beam search against one copy for each beam; prefix cache off."]
    return table


def hold(requests: Sequence[Generate], *, block_size: int, running: int) -> Held:
    """Run requests through planner and pool, every token being the same, and see what the blocks hold."""
    from workers.config import EngineConfig
    from workers.engine.plan import Sampled, StepResult
    from workers.engine.planner import Planner

    longest = max(len(request.tokens) + request.max_tokens for request in requests)
    blocks = running * (-(-longest // block_size) + 2) + 2
    config = EngineConfig(
        block_size=block_size, max_running=running, max_step_tokens=max(STEP_TOKENS, running), prefix_cache=False
    )
    planner = Planner(config, blocks=blocks, max_context=longest + 1)
    for request in requests:
        planner.add(request)
    shares, tokens, counts = [], [], []
    peak = 0
    while (plan := planner.plan()) is not None:
        peak = max(peak, planner.pool.used)
        result = StepResult([Sampled([1]) for chunk in plan.chunks for _ in chunk.samplers])
        planner.commit(plan, result)
        active, used = planner.roster.running, planner.pool.used
        if used:
            computed = sum(sequence.computed for sequence in active)
            shares.append(computed / (used * block_size))
            tokens.append(computed)
            counts.append(len(active))
    return Held(statistics.mean(shares), statistics.mean(tokens), statistics.mean(counts), peak)


def _generate(name: str, tokens: Sequence[int], max_tokens: int, n: int = 1) -> Generate:
    from workers.protocol import Generate, SamplingParams

    return Generate(name, list(tokens), max_tokens, SamplingParams(seed=0, ignore_eos=True), n=n)
