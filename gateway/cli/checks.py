"""What ``forebay doctor`` looks at. Every check reads only; none starts, downloads or mends anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gateway.cli.output import UserError

if TYPE_CHECKING:
    from gateway.settings import Settings

IMPORT_NAMES = ("gateway", "policies", "workers")
MIN_FREE_BYTES = 2**30

# In a process of its own: the gateway's side never imports torch, and a broken driver must not end the doctor.
_DEVICES = """
import json, torch
from torch import distributed
spoken = {}
if distributed.is_available():
    spoken = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
                  "gpus": [[g.name, g.total_memory] for g in gpus], "mkldnn": torch.backends.mkldnn.is_available(),
                  "between": spoken}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    status: Literal["ok", "note", "fail"]
    what: str
    detail: str


def everything(config: str | None) -> list[Finding]:
    """All findings, in the order a reader wants them. ``config`` None means the demo."""
    findings = [*versions(), *import_names(), *devices(), *compiler(), *allocator(), *cache()]
    from gateway.cli.loading import load_config

    try:
        loaded = load_config(config)
    except UserError as error:
        return [*findings, Finding("fail", "configuration", str(error).replace("\n", "; "))]
    settings, path = loaded.settings, loaded.path
    findings.append(Finding("ok", "configuration", str(path)))
    return [*findings, *models(settings, path), *keys(settings), *ports(settings)]


def versions() -> Iterator[Finding]:
    """Interpreter, system, and every library that pyproject.toml asks for."""
    ok = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} ({sys.executable})"
    yield Finding("ok" if ok else "fail", "python", detail if ok else f"{detail}; 3.11 or newer is needed")
    machine = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    yield Finding("ok", "system", machine)
    try:
        distribution = importlib.metadata.distribution("forebay")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("note", "forebay", "not installed: run from its source tree (`make setup` installs it)")
        return
    yield Finding("ok", "forebay", distribution.version)
    for requirement in distribution.requires or []:
        if "extra ==" in requirement or "sys_platform ==" in requirement:
            continue
        name = _requirement_name(requirement)
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", name, f"missing; pip install '{requirement}'")


def _requirement_name(requirement: str) -> str:
    end = next((i for i, char in enumerate(requirement) if not (char.isalnum() or char in "-_.")), len(requirement))
    return requirement[:end]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_names() -> Iterator[Finding]:
    """Where ``gateway``, ``policies`` and ``workers`` come from: general names that another package may also claim."""
    owners = importlib.metadata.packages_distributions()
    home = Path(__file__).resolve().parents[2]
    for name in IMPORT_NAMES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        others = sorted(set(owners.get(name, [])) - {"forebay"})
        if origin is None:
            yield Finding("fail", f"import {name}", "not found; reinstall forebay")
        elif not origin.is_relative_to(home):
            yield Finding("fail", f"import {name}", f"comes from {origin}, not from Forebay in {home}")
        elif others:
            yield Finding("fail", f"import {name}", f"also claimed by {', '.join(others)}; uninstall that distribution")
        else:
            yield Finding("ok", f"import {name}", str(origin.parent))


def devices() -> Iterator[Finding]:
    """What PyTorch can compute on."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter and a fixed program
            [sys.executable, "-c", _DEVICES], capture_output=True, text=True, timeout=120, check=True
        )
        found = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        yield Finding("fail", "torch", f"cannot be loaded: {' '.join(last)}")
        return
    yield Finding("ok", "device cpu", f"{found['threads']} threads, torch {found['torch']}, oneDNN {found['mkldnn']}")
    yield _between(found["between"], len(found["gpus"]))
    for index, (name, memory) in enumerate(found["gpus"]):
        yield Finding("ok", f"device cuda:{index}", f"{name}, {memory / 2**30:.0f} GiB, CUDA {found['cuda']}")
    if not found["gpus"]:
        yield Finding("note", "device cuda", "none; workers compute on the CPU")
        return
    kernels = {name: _installed(name) for name in ("flashinfer-python", "triton")}
    there = ", ".join(f"{name} {version}" for name, version in kernels.items() if version)
    lacking = "neither flashinfer-python nor triton: attention runs in PyTorch; pip install 'forebay[gpu]'"
    yield Finding("ok" if there else "note", "GPU kernels", there or lacking)


def _between(backends: dict[str, bool], gpus: int) -> Finding:
    """What ``engine.tensor_parallel`` and ``pipeline_parallel`` would have to speak with."""
    wanted = "nccl" if gpus > 1 else "gloo"
    there = ", ".join(name for name, is_there in backends.items() if is_there) or "none"
    detail = f"torch.distributed: {there}; {max(1, gpus)} device(s), on a CPU any number of processes"
    return Finding("ok" if backends.get(wanted) else "note", "several devices", detail)


def compiler() -> Iterator[Finding]:
    """A C++ compiler is optional: the native CPU kernel is built with it where there is one. Builds nothing itself."""
    from workers.model.native import build  # no torch

    found = build.compiler()
    flags = f"{build.architecture_flag()} {build.optimisation()}"
    yield Finding("note" if found is None else "ok", "C++ compiler", found or "none (g++, c++, clang++ or $CXX)")
    place = None
    try:
        place = build.ready(found)
        if place is not None:
            yield Finding("ok", "native kernel", f"{build.load().fb_isa().decode()} ({flags}), {place}")
        elif found is None:
            without = "cannot be built without a compiler; PyTorch is used, slower on a CPU"
            yield Finding("note", "native kernel", without)
        else:
            state = "damaged" if build.place_of(found).exists() else "not built yet"
            yield Finding("note", "native kernel", f"{state} ({flags}): the first worker compiles it, about 20 s, once")
    except (OSError, subprocess.SubprocessError, build.NativeUnavailableError) as error:
        remedy = "" if place is None else f"; remove {place} to have it built anew"
        yield Finding("fail", "native kernel", f"{error}{remedy}")


def allocator() -> Iterator[Finding]:
    """tcmalloc or jemalloc, which local workers are started with where one is installed."""
    from workers import host  # no torch

    found = host.find()
    if found is None:
        yield Finding("note", "allocator", "the system's; workers take tcmalloc or jemalloc where one is installed")
    else:
        yield Finding("ok", "allocator", f"{found[0]} ({found[1]}), preloaded into local workers")


def cache() -> Iterator[Finding]:
    """The folder of unpacked models: writable, with room."""
    from workers.model_store import cache_dir

    place = cache_dir()
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("fail", "cache", f"{existing} is not writable; set FOREBAY_CACHE to a folder that is")
        return
    free = shutil.disk_usage(existing).free
    enough = free >= MIN_FREE_BYTES
    yield Finding("ok" if enough else "note", "cache", f"{place}, {free / 2**30:.1f} GiB free")
    for marker in sorted(place.glob("models/*/forebay.json")):
        size = sum(path.stat().st_size for path in marker.parent.iterdir() if path.is_file())
        yield Finding("ok", "model files", f"{marker.parent} ({size / 2**20:.0f} MiB)")


def models(settings: Settings, path: Path) -> Iterator[Finding]:
    """Can the configuration's models be found? Bundled ones are fetched at the first start."""
    from workers.model_store import ModelStoreError, resolve

    for model in settings.models:
        what = f"model {model.name}"
        if model.source is None:
            yield Finding("ok", what, "no files: its pools are upstreams")
            continue
        if model.source.startswith("pypi:"):
            name = model.source.removeprefix("pypi:")
            present = _unpacked(name)
            detail = f"{model.source}, unpacked" if present else f"{model.source}, not here yet: `forebay model pull`"
            yield Finding("ok" if present else "note", what, detail)
            continue
        try:
            yield Finding("ok", what, f"{model.source} in {resolve(model.source, base_dir=path.parent).dir}")
        except ModelStoreError as error:
            yield Finding("fail", what, str(error))


def _unpacked(distribution: str) -> bool:
    from workers.model_store import cache_dir

    return any(cache_dir().glob(f"models/{distribution}-*/forebay.json"))


def keys(settings: Settings) -> Iterator[Finding]:
    """Are the secrets there that the configuration names by environment variable?"""
    from gateway.cli.devkey import find_key, jwt_settings

    jwt = jwt_settings(settings)
    if jwt is not None and jwt.key_env is not None:
        key = find_key(jwt.key_env)
        if key is None:
            remedy = "`forebay serve --dev` makes one for this machine"
            yield Finding("note", "token key", f"{jwt.key_env} is not set; {remedy}")
        else:
            yield Finding("ok", "token key", key.origin)
    name = settings.admin.token_env
    if name:
        state = "set" if os.environ.get(name) else "not set: the admin port answers to this machine only"
        yield Finding("ok", "admin token", f"{name} is {state}")


def ports(settings: Settings) -> Iterator[Finding]:
    """Are the listeners' ports free, and if not, is it Forebay that holds them?"""
    for what, at in (("listen", settings.listen), ("admin", settings.admin)):
        host, port = at.host, at.port
        if port == 0:
            yield Finding("ok", f"port {what}", "0: a free one is picked at start")
            continue
        from gateway.cli.listener import bind

        try:
            bind(host, port, what).close()
        except UserError as error:
            ours = _healthy(host, port, tls=at.tls is not None)
            detail = f"{port}: a gateway is running there" if ours else str(error)
            yield Finding("note" if ours else "fail", f"port {what}", detail)
        else:
            yield Finding("ok", f"port {what}", f"{host}:{port} is free")


def _healthy(host: str, port: int, *, tls: bool) -> bool:
    import http.client
    import ssl

    if tls:  # whoever it is: this only tells a taken port from one of ours
        unverified = ssl._create_unverified_context()  # noqa: S323
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, timeout=1, context=unverified)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
