"""``bench engine`` and ``bench floor``: our engine in this process, and what this machine could do at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gateway.bench.display import Display
from gateway.bench.engine import BenchEngine, measure, open_engine
from gateway.bench.floor import Machine, Shape, floor, shape_of
from gateway.bench.metrics import Slo
from gateway.bench.report import Report, machine, model_versions, software
from gateway.bench.target import Target

if TYPE_CHECKING:
    from workers.model.roofline import Rates


def engine_report(
    target: Target,
    display: Display,
    *,
    input_tokens: int,
    output_tokens: int,
    concurrency: Sequence[int],
    requests: int | None = None,
    seed: int = 0,
    slo: Slo | None = None,
    with_floor: bool = True,
) -> Report:
    """Equal requests in a closed loop, one run per number under way. Raises BenchError."""
    from workers import heap

    with display.task("load the model") as tick:
        engine = open_engine(
            target.source,
            target.engine,
            base_dir=target.base_dir,
            progress=lambda stage, done, total: tick(done, total),
        )
    limits = floors(engine, display) if with_floor else None
    report = Report(
        "engine",
        engine.versions(),
        {"input": input_tokens, "output": output_tokens, "seed": seed, "engine": target.engine.model_dump()},
    )
    try:
        heap.settle()  # as a worker does
        for count in concurrency:
            with display.task(f"{count} running") as tick:
                run = measure(
                    engine,
                    f"engine/{seed}/{count}",
                    input_tokens=input_tokens,
                    output_tokens=output_tokens,
                    concurrency=count,
                    requests=requests,
                    slo=slo,
                    progress=tick,
                )
            if limits is not None:
                run["floor"] = of(limits, count, input_tokens, output_tokens)
            report.runs.append(run)
        report.extra = {"sizes": engine.sizes(), **({"machine_limits": limits[2]} if limits is not None else {})}
    finally:
        engine.close()
        heap.release()
    return report


Limits = tuple[Shape, Machine, dict[str, Any]]
"""The model's shape, the machine, and its rates as reports write them."""


def floors(engine: BenchEngine, display: Display) -> Limits:
    """Measure the machine for a loaded model."""
    loaded = engine.loaded
    rates = _measure(display, loaded.device, loaded.dtype, engine.config.threads)
    shape = shape_of(loaded.config, loaded.dtype)
    if (loaded.weight_dtype, loaded.kv_dtype) != (loaded.dtype, loaded.dtype):
        linears = shape.layer_weights + shape.head_weights
        embedding = 0 if loaded.config.tied else shape.head_weights  # is looked up, not multiplied with
        kept = loaded.weight_bytes * linears // (linears + embedding)
        shape = replace(shape, kept_weights=kept, kept_token=loaded.kv_bytes_per_token)
    return shape, _machine(rates, loaded.dtype), asdict(rates)


def of(limits: Limits, concurrency: int, input_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The ``floor`` of a run."""
    shape, limit, _ = limits
    return floor(
        shape, limit, concurrency=concurrency, input_tokens=input_tokens, output_tokens=output_tokens
    ).to_json()


def floor_report(
    target: Target,
    display: Display,
    *,
    input_tokens: int,
    output_tokens: int,
    concurrency: Sequence[int],
    dtype: str | None = None,
) -> Report:
    """The machine's rates and the floor of a load on it; the model's weights are not read. Raises BenchError."""
    from workers.model.config import read_config
    from workers.model.loading import device_name, pick_device, pick_dtype

    files = target.files()
    device = pick_device(target.engine.device)
    kind = dtype or str(pick_dtype(target.engine, device)).removeprefix("torch.")
    shape = shape_of(read_config(files.dir), kind)
    rates = _measure(display, str(device), kind, target.engine.threads)
    limits = (shape, _machine(rates, kind), asdict(rates))
    versions = {
        **software(),
        **model_versions(target.source, files),
        "kernels": "none: the machine alone",
        "device": str(device),
        "device_name": device_name(device),
        "dtype": kind,
        "machine": machine(),
    }
    report = Report("floor", versions, {"input": input_tokens, "output": output_tokens})
    report.extra = {"machine_limits": limits[2], "model": asdict(shape)}
    for count in concurrency:
        run = {"concurrency": count, "input": input_tokens, "output": output_tokens}
        report.runs.append({**run, "floor": of(limits, count, input_tokens, output_tokens)})
    return report


def _measure(display: Display, device: str, dtype: str, threads: int | None) -> Rates:
    from workers.model.roofline import measure as measure_rates

    with display.task("measure memory bandwidth and flop rate"):
        return measure_rates(device, dtypes=tuple(dict.fromkeys(("float32", dtype))), threads=threads)


def _machine(rates: Rates, dtype: str) -> Machine:
    return Machine(rates.bytes_s, rates.flops_s[dtype])
