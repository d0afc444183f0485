"""Table 4: what the prefix cache gains where there is a common prefix, and costs where there is none."""

from __future__ import annotations

import statistics

from gateway.bench import load, metrics
from gateway.bench.render import Table
from gateway.bench.tables.lab import Lab, Sizes


def run(lab: Lab, sizes: Sizes) -> list[Table]:
    """First and later time to first token, cache on and off; then throughput with nothing to hit."""
    return [_common(lab, sizes), _distinct(lab, sizes)]


def _common(lab: Lab, sizes: Sizes) -> Table:
    table = Table(
        f"4a. A common prefix of {sizes.prefix:,} tokens, {sizes.prefix_own} of their own",
        ("prefix cache", "first TTFT ms", "later TTFT ms", "first : later", "hit tokens"),
    )
    blocks = lab.blocks(4 * (sizes.prefix + sizes.prefix_own + 64))
    for on in (True, False):
        with lab.engine(prefix_cache=on, blocks=blocks, max_running=4) as engine:
            warm = load.uniform(f"{lab.seed}/t4/warm/{on}", 1, 64, 4, engine.vocab, 1)
            lab.run(engine, "warm up", warm)
            work = load.common_prefix(
                f"{lab.seed}/t4/{on}", 1 + sizes.prefix_later, sizes.prefix, sizes.prefix_own, 4, engine.vocab
            )
            lines = lab.run(engine, f"common prefix, cache {_word(on)}", work)
        first, *later = [(metrics.ttft(line) or 0.0) * 1e3 for line in lines]
        middle = statistics.median(later)
        table.add(_word(on), first, middle, first / middle, sum(line.cached or 0 for line in lines))
    return table


def _distinct(lab: Lab, sizes: Sizes) -> Table:
    given, wanted, running = sizes.distinct
    table = Table(
        f"4b. Nothing to hit: {given:,} in / {wanted} out, {running} at once",
        ("prefix cache", "all tok/s", "low", "high", "bookkeeping", "on : off"),
    )
    blocks = lab.blocks((running + 1) * (given + wanted + 64))
    rates: dict[bool, list[float]] = {True: [], False: []}
    shares: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(sizes.distinct_rounds):
        for on in (True, False) if turn % 2 == 0 else (False, True):
            with lab.engine(prefix_cache=on, blocks=blocks, max_running=running) as engine:
                label = f"{lab.seed}/t4b/{turn}/{on}"
                lab.run(engine, "warm up", load.uniform(f"{label}/warm", running, 16, 4, engine.vocab, None))
                work = load.uniform(label, running, given, wanted, engine.vocab, None)
                lines = lab.run(engine, f"nothing to hit, cache {_word(on)}, round {turn + 1}", work)
                shares[on].append(engine.steps.figures()["bookkeeping_share"])
            rates[on].append(metrics.summarise(lines)["total_tokens_s"])
    pairs = [mine / other for mine, other in zip(rates[True], rates[False], strict=True)]
    for on in (True, False):
        ratio = statistics.median(pairs) if on else None
        book = f"{statistics.median(shares[on]):.2%}"
        table.add(_word(on), statistics.median(rates[on]), min(rates[on]), max(rates[on]), book, ratio)
    table.notes = [
        f"{sizes.distinct_rounds} rounds in alternation; the ratio is the median of each round's.",
        "Bookkeeping: part of the step time outside the model, where keys are made and looked up.",
    ]
    return table


def _word(on: bool) -> str:
    return "on" if on else "off"
