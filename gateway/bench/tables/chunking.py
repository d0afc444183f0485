"""Table 3: one stream decodes while long prompts arrive, under several step budgets."""

from __future__ import annotations

from gateway.bench import load, metrics
from gateway.bench.render import Table
from gateway.bench.tables.lab import Lab, Sizes


def run(lab: Lab, sizes: Sizes) -> list[Table]:
    """The largest gap in the stream, and when the prompts got their first tokens."""
    table = Table(
        f"3. One stream of {sizes.stream[1]} tokens while {sizes.long_prompts} prompts of {sizes.long_prompt:,} arrive",
        ("chunk", "largest gap ms", "ITL p50 ms", "TTFT of the prompts s", "all tok/s", "longest step ms"),
    )
    room = lab.blocks((sizes.long_prompts + 1) * (sizes.long_prompt + sizes.stream[1] + 64))
    for chunk in sizes.chunks:
        with lab.engine(max_step_tokens=chunk, max_running=8, blocks=room, prefix_cache=False) as engine:
            lab.run(engine, "warm up", load.uniform(f"{lab.seed}/t3/warm/{chunk}", 2, 64, 4, engine.vocab, 2))
            work = load.interrupted(
                f"{lab.seed}/t3/{chunk}",
                engine.vocab,
                stream=sizes.stream,
                prompts=sizes.long_prompts,
                length=sizes.long_prompt,
                at_token=sizes.stream_at,
            )
            stream, *others = lab.run(engine, f"chunk {chunk}", work)
            steps = engine.steps.figures()
        gaps = metrics.gaps(stream)
        first = [value for line in others if (value := metrics.ttft(line)) is not None]
        table.add(
            str(chunk),
            max(gaps) * 1e3,
            (metrics.percentile(gaps, 0.5) or 0.0) * 1e3,
            ", ".join(f"{value:.2f}" for value in first),
            metrics.summarise([stream, *others])["total_tokens_s"],
            steps["step_max_ms"],
        )
    return [table]
