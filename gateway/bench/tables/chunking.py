"""Table 3: one stream decodes while long prompts arrive, under several step budgets."""

from __future__ import annotations

from functools import partial

from gateway.bench import gap, load, metrics
from gateway.bench.render import Table
from gateway.bench.tables.lab import Lab, Sizes

COLUMNS = (
    "chunk",
    "largest gap ms",
    "longest chunk ms",
    "step ms",
    "gap : both",
    "first chunk ms",
    "TTFT of the prompts s",
    "all tok/s",
)


def run(lab: Lab, sizes: Sizes) -> list[Table]:
    """The largest gap in the stream beside one chunk's time and a step's, and when the prompts got first tokens."""
    prompts, length = sizes.long_prompts, sizes.long_prompt
    table = Table(f"3. One stream of {sizes.stream[1]} tokens while {prompts} prompts of {length:,} arrive", COLUMNS)
    room = lab.blocks((prompts + 1) * (length + sizes.stream[1] + 64))
    for chunk in sizes.chunks:
        with lab.engine(max_step_tokens=chunk, max_running=8, blocks=room, prefix_cache=False) as engine:
            lab.run(engine, "warm up", load.uniform(f"{lab.seed}/t3/warm/{chunk}", 2, 64, 4, engine.vocab, 2))
            found, lines = gap.measure(
                partial(lab.run, engine, f"chunk {chunk}"),
                f"{lab.seed}/t3/{chunk}",
                engine.vocab,
                chunk,
                stream=sizes.stream,
                prompts=prompts,
                length=length,
                at_token=sizes.stream_at,
            )
        first = [value for line in lines[1:] if (value := metrics.ttft(line)) is not None]
        table.add(
            str(chunk),
            found.largest_gap_ms,
            found.longest_chunk_ms,
            found.step_ms,
            found.of_limit,
            found.first_chunk_ms,
            ", ".join(f"{value:.2f}" for value in first),
            metrics.summarise(lines)["total_tokens_s"],
        )
    table.notes = [
        f"Longest chunk: the longest step of such a prompt alone; first chunk: a prompt as long as the chunk, alone "
        f"(medians of {gap.ALONE}). Step: the stream's median gap before the prompts came."
    ]
    return [table]
